"""Sharpness-aware minimisation: the weights move uphill, and the gradient is taken there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

RHO, LR = 0.3, 0.1

Batch = dict[str, Tensor]
Closure = Callable[[], Tensor]


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def make_batch(generator: torch.Generator) -> Batch:
    y = torch.arange(12) // 4  # sorted by class: what a careless sampler does
    return {"x": torch.randn(12, 6, generator=generator) + y[:, None] * 0.4, "y": y}


def smoothed(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b["x"]), b["y"], label_smoothing=0.1)


case = Case(model=classifier, batch=make_batch, loss=smoothed, layout="1x2")


class SAM:
    def __init__(self, params: list[nn.Parameter], base: torch.optim.Optimizer) -> None:
        self.params, self.base = params, base

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def climb(self) -> list[Tensor]:
        norm = torch.stack([p.grad.norm() for p in self.params]).norm()
        uphill = [p.grad * (RHO / (norm + 1e-12)) for p in self.params]
        for p, e in zip(self.params, uphill):
            p.add_(e)
        return uphill

    @torch.no_grad()
    def descend(self, uphill: list[Tensor]) -> None:
        for p, e in zip(self.params, uphill):
            p.sub_(e)
        self.base.step()

    def step(self, first: Closure, second: Closure) -> None:
        self.zero_grad()
        first().backward()
        uphill = self.climb()
        self.zero_grad()
        second().backward()
        self.descend(uphill)


def sam_for(model: nn.Module) -> SAM:
    params = list(model.parameters())
    return SAM(params, torch.optim.SGD(params, lr=LR))


def one_device(model: nn.Module) -> Callable[[Batch], None]:
    """The reference: both gradients from the big batch."""
    sam = sam_for(model)
    return lambda b: sam.step(lambda: smoothed(model, b), lambda: smoothed(model, b))


class Train:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model = model
        self.ddp = DistributedDataParallel(model)
        self.sam = sam_for(model)

    def __call__(self, b: Batch) -> None:
        self.sam.step(
            first=lambda: smoothed(self.model, b),
            second=lambda: smoothed(self.ddp, b),
        )


step = Train
options = {"compare": "update", "reference": one_device, "steps": 2}
