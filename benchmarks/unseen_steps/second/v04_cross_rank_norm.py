"""A small convolutional classifier with a batch norm whose statistics are those of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


def total(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over all ranks of a group, or the values themselves without one."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


class NormalizeOverBatch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: dist.ProcessGroup | None) -> Tensor:
        dims = [0, *range(2, x.dim())]
        moments = torch.stack(
            [x.sum(dims), x.square().sum(dims), x.new_full((x.shape[1],), x.numel() / x.shape[1])]
        )
        summed, squares, count = total(moments, group)
        mean = summed / count
        inverse = (squares / count - mean.square() + eps).rsqrt()
        shape = [1, -1] + [1] * (x.dim() - 2)
        normalized = (x - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normalized, inverse)
        ctx.dims, ctx.shape, ctx.group = dims, shape, group
        return normalized

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        normalized, inverse = ctx.saved_tensors
        mean_grad = grad.mean(ctx.dims)
        mean_product = (grad * normalized).mean(ctx.dims)
        centered = grad - mean_grad.view(ctx.shape) - normalized * mean_product.view(ctx.shape)
        return centered * inverse.view(ctx.shape), None, None


class CrossRankNorm2d(nn.Module):
    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        normalized = NormalizeOverBatch.apply(x, self.eps, self.group)
        return normalized * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        CrossRankNorm2d(6),
        nn.GELU(),
        nn.Conv2d(6, 6, 3, stride=2),
        CrossRankNorm2d(6),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


def images(generator: torch.Generator) -> Batch:
    brightness = torch.linspace(0.3, 2.0, 12).view(-1, 1, 1, 1)
    return {
        "pixels": brightness * torch.randn(12, 1, 6, 6, generator=generator),
        "labels": torch.randint(5, (12,), generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["pixels"]), batch["labels"])


def synchronize_norms(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    for module in model.modules():
        if isinstance(module, CrossRankNorm2d):
            module.group = group
    return model


case = Case(model=build_model, batch=images, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(synchronize_norms(model, dist.group.WORLD))
    loss(ddp, shard).backward()
