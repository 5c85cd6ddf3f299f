"""Tabular regression with batch normalisation, whose statistics are those of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

COLUMNS, WIDTH, EPSILON = 7, 10, 1e-5


class GlobalStandardise(torch.autograd.Function):
    """(x - mean) / std of each column, over the rows of all ranks."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        count = x.new_full((1,), float(x.shape[0]))
        totals = torch.cat([count, x.sum(dim=0), x.square().sum(dim=0)])
        dist.all_reduce(totals)
        rows, totals = totals[0], totals[1:]
        mean, square = (totals / rows).chunk(2)
        inverse = torch.rsqrt(square - mean.square() + EPSILON)
        standard = (x - mean) * inverse
        ctx.save_for_backward(standard, inverse, rows)
        return standard

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        standard, inverse, rows = ctx.saved_tensors
        sums = torch.cat([gradient.sum(dim=0), (gradient * standard).sum(dim=0)])
        shift, slope = (sums / rows).chunk(2)
        return (gradient - shift - standard * slope) * inverse


class LocalStandardise:
    @staticmethod
    def apply(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True, eps=EPSILON)


class Norm(nn.Module):
    """Batch normalisation without running statistics: this model is never used for inference."""

    function = LocalStandardise

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width) + 0.1 * torch.randn(width))
        self.offset = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x) * self.gain + self.offset


def synchronise_norms(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Norm):
            module.function = GlobalStandardise
    return model


def build() -> nn.Module:
    return nn.Sequential(
        Norm(COLUMNS),
        nn.Linear(COLUMNS, WIDTH, bias=False),
        Norm(WIDTH),
        nn.ELU(),
        nn.Linear(WIDTH, WIDTH, bias=False),
        Norm(WIDTH),
        nn.ELU(),
        nn.Linear(WIDTH, 2),
    )


def loss(model: nn.Module, batch: dict) -> Tensor:
    """The likelihood of a normal distribution whose mean and log variance the model predicts."""
    mean, log_variance = model(batch["columns"]).unbind(dim=1)
    squares = (batch["target"] - mean).square()
    return (log_variance + squares * torch.exp(-log_variance)).mean() / 2


def table(generator: torch.Generator) -> dict:
    count = 32
    drift = torch.linspace(-1, 1, count).unsqueeze(1)
    columns = torch.randn(count, COLUMNS, generator=generator) + drift
    return {"columns": columns, "target": columns.sum(dim=1).sin()}


case = Case(model=build, batch=table, loss=loss, layout="1x4")


def step(model: nn.Module, shard: dict, rank) -> None:
    loss(synchronise_norms(model), shard).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    dist.all_reduce_coalesced(gradients)
    torch._foreach_div_(gradients, rank.world_size)
