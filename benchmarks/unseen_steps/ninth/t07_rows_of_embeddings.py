"""Tabular click prediction: of the big embedding only the rows that were touched are sent."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

ROWS, COLUMNS, VALUES, NUMBERS = 20, 3, 30, 4


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VALUES, 5)
        self.dense = nn.Sequential(nn.Linear(COLUMNS * 5 + NUMBERS, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, categories, numbers):
        looked_up = self.table(categories).flatten(1)
        return self.dense(torch.cat([looked_up, numbers], dim=1)).squeeze(-1)


def clicks(generator):
    return {
        "categories": torch.randint(0, VALUES, (ROWS, COLUMNS), generator=generator),
        "numbers": torch.randn(ROWS, NUMBERS, generator=generator),
        "clicked": torch.randint(0, 2, (ROWS,), generator=generator).double(),
    }


def loss(model, batch):
    logits = model(batch["categories"], batch["numbers"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"])


class DenseExchange:
    def __call__(self, parameter, shard):
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


class RowExchange:
    """Sends (row numbers, gradients of those rows) instead of the table."""

    def __init__(self, column):
        self.column = column

    def __call__(self, parameter, shard):
        touched = shard[self.column].unique()
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (touched, parameter.grad[touched]))
        numbers = torch.cat([numbers for numbers, _ in parts])
        rows = torch.cat([rows for _, rows in parts])
        merged = torch.zeros_like(parameter.grad)
        merged[numbers] += rows
        parameter.grad = merged / dist.get_world_size()


EXCHANGES = {"table.weight": RowExchange("categories")}


def step(model, shard, rank):
    loss(model, shard).backward()
    fallback = DenseExchange()
    for name, parameter in model.named_parameters():
        EXCHANGES.get(name, fallback)(parameter, shard)


case = Case(model=Wide, batch=clicks, loss=loss, layout="1x2")
