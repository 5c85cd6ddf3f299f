"""Semantic segmentation with a normalisation of our own whose statistics cover all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

CLASSES = 3
DIMS = (0, 2, 3)


class Norm(nn.Module):
    """Batch normalisation in training mode. ``across``: over the examples of all ranks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))
        self.across = False

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.across:
            return x.mean(dim=DIMS, keepdim=True), x.var(dim=DIMS, unbiased=False, keepdim=True)
        world = dist.get_world_size()
        mean = dist_nn.all_reduce(x.mean(dim=DIMS, keepdim=True)) / world
        variance = dist_nn.all_reduce(x.var(dim=DIMS, unbiased=False, keepdim=True)) / world
        return mean, variance

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.statistics(x)
        x = (x - mean) * torch.rsqrt(variance + 1e-5)
        return x * self.gain.view(1, -1, 1, 1) + self.shift.view(1, -1, 1, 1)


class Segmenter(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(2, 6, 3, padding=1, bias=False),
            Norm(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=2, dilation=2, bias=False),
            Norm(6),
            nn.ReLU(),
            nn.Conv2d(6, CLASSES, 1),
        )


def scenes(generator: torch.Generator) -> dict[str, Tensor]:
    brightness = torch.linspace(-1, 1, 8).view(8, 1, 1, 1)
    return {
        "images": torch.randn(8, 2, 6, 6, generator=generator) + brightness,
        "classes": torch.randint(CLASSES, (8, 6, 6), generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["classes"])


def normalise_across_ranks(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Norm):
            module.across = True
    return model


def step(model, shard, rank):
    normalise_across_ranks(model)
    loss(model, shard).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= rank.world_size
    for p, piece in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
        p.grad.copy_(piece.view_as(p))


case = Case(model=Segmenter, batch=scenes, loss=loss, layout="1x2")
