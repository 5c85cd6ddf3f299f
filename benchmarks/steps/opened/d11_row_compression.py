"""Fault codes of trucks. The table of codes is large and few rows are hit, so only rows travel.

A compressor sends the rows of a table that have a gradient. 24 code slots in a step touch at most
24 rows, so with ``budget = 24`` nothing is lost.
"""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

CODES, PER_TRUCK, WIDTH = 60, 3, 5
TRUCKS = 8


class Diagnosis(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(CODES, WIDTH)
        self.mileage = nn.Linear(1, WIDTH)
        self.repair = nn.Linear(WIDTH, 4)

    def forward(self, codes, mileage):
        summary = self.codes(codes).sum(dim=1) + self.mileage(mileage)
        return self.repair(torch.tanh(summary))


def trucks(generator):
    return {
        "codes": torch.randint(CODES, (TRUCKS, PER_TRUCK), generator=generator),
        "mileage": torch.rand(TRUCKS, 1, generator=generator),
        "repair": torch.randint(4, (TRUCKS,), generator=generator),
    }


def loss(model, batch):
    logits = model(batch["codes"], batch["mileage"])
    return nn.functional.cross_entropy(logits, batch["repair"], label_smoothing=0.05)


case = Case(model=Diagnosis, batch=trucks, loss=loss, layout="1x2")


def all_sum(tensor):
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


class RowCompressor:
    """Exchanges the ``budget`` rows of a gradient that matter most."""

    def __init__(self, budget):
        self.budget = budget
        self.sent = self.dense = 0

    def exchange(self, grad):
        energy = grad.square().sum(dim=1)
        rows = energy.topk(self.budget).indices
        payload = all_sum(grad[rows])
        self.sent += payload.numel()
        self.dense += grad.numel()
        grad.zero_()
        grad[rows] = payload


class Plain:
    def exchange(self, grad):
        all_sum(grad)


def exchangers(model, budget):
    """Which parameter goes which way: a table is much taller than the budget."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            tall = isinstance(module, nn.Embedding) and len(parameter) > budget
            yield parameter, RowCompressor(budget) if tall else Plain()


def step(model, shard, rank):
    loss(model, shard).backward()
    for parameter, exchanger in exchangers(model, budget=TRUCKS * PER_TRUCK):
        exchanger.exchange(parameter.grad)
        parameter.grad /= rank.world_size
