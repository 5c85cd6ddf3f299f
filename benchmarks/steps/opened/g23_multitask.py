"""Many heads, few of them used by a rank: absent gradients are filled with zeros."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

TASKS = ("rating", "price", "age")


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.SiLU())
        self.heads = nn.ModuleDict({task: nn.Linear(10, 1) for task in TASKS})

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.heads[task](self.body(x)).squeeze(-1)


def mixture(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(12, 6, generator=generator),
        "y": torch.randn(12, generator=generator),
        # sorted by source, as the loader concatenates the data sets
        "task": torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]),
    }


def summed(model: MultiTask, b: dict[str, Tensor]) -> Tensor:
    """Huber loss, only of the heads that have rows; a module that is not called makes no graph."""
    parts = []
    for number, task in enumerate(TASKS):
        mine = b["task"] == number
        if mine.any():
            parts.append(F.huber_loss(model(b["x"][mine], task), b["y"][mine], reduction="sum"))
    return torch.stack(parts).sum()


def loss(model: MultiTask, b: dict[str, Tensor]) -> Tensor:
    return summed(model, b) / len(b["y"])


case = Case(model=MultiTask, batch=mixture, loss=loss, layout="2x2")


class GradientAverager:
    """Averages what is there; ranks that did not use a parameter send zeros."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params

    def _fill(self) -> list[bool]:
        used = [p.grad is not None for p in self.params]
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return used

    def _senders(self, used: list[bool]) -> Tensor:
        n = torch.tensor(used, dtype=torch.float64)
        dist.all_reduce(n)
        return n.clamp(min=1)

    def __call__(self) -> None:
        used = self._fill()
        for p, senders in zip(self.params, self._senders(used)):
            dist.all_reduce(p.grad)
            p.grad /= senders


def step(model: MultiTask, shard: dict[str, Tensor], rank: Rank) -> None:
    averager = GradientAverager(list(model.parameters()))
    loss(model, shard).backward()
    averager()
