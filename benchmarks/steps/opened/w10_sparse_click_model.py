"""A click model with sparse embedding gradients, which the trainer exchanges as rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass(frozen=True)
class ClickConfig:
    items: int = 15
    history: int = 4
    embed: int = 5
    dense: int = 3


CONFIG = ClickConfig()
EXAMPLES = 16


class ClickModel(nn.Module):
    def __init__(self, config: ClickConfig = CONFIG) -> None:
        super().__init__()
        self.items = nn.Embedding(config.items, config.embed, sparse=True)
        self.tower = nn.Sequential(
            nn.Linear(config.embed + config.dense, 10), nn.ReLU(), nn.Linear(10, 1)
        )

    def forward(self, history, context):
        interest = self.items(history).mean(dim=1)
        return self.tower(torch.cat([interest, context], dim=1)).squeeze(1)


def click_loss(model, batch):
    logits = model(batch["history"], batch["context"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"])


def make_batch(generator):
    popularity = 1 / torch.arange(1, CONFIG.items + 1)
    draws = torch.multinomial(
        popularity, EXAMPLES * CONFIG.history, replacement=True, generator=generator
    )
    return {
        "history": draws.view(EXAMPLES, CONFIG.history),
        "context": torch.randn(EXAMPLES, CONFIG.dense, generator=generator),
        "clicked": torch.randint(2, (EXAMPLES,), generator=generator).float(),
    }


case = Case(model=ClickModel, batch=make_batch, loss=click_loss, layout="1x2")


def gather_from_all(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


class GradientExchange:
    """Averages gradients over the ranks; of sparse ones only the rows that were read travel."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.world_size = dist.get_world_size()

    def average_rows(self, parameter: nn.Parameter) -> torch.Tensor:
        grad = parameter.grad
        rows = gather_from_all(grad._indices()[0])
        values = gather_from_all(grad._values()) / self.world_size
        averaged = torch.zeros_like(parameter)
        averaged[rows] += values
        return averaged

    def average_dense(self, parameter: nn.Parameter) -> torch.Tensor:
        grad = parameter.grad.clone()
        dist.all_reduce(grad)
        return grad / self.world_size

    @torch.no_grad()
    def __call__(self) -> None:
        for parameter in self.model.parameters():
            average = self.average_rows if parameter.grad.is_sparse else self.average_dense
            parameter.grad = average(parameter)


def step(model, shard, rank):
    exchange = GradientExchange(model)
    click_loss(model, shard).backward()
    exchange()
