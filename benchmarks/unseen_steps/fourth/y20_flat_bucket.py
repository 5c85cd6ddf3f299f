"""Image classification with gradients that travel in one flat, aligned bucket."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

IMAGES, SIZE, CLASSES = 12, 6, 5
ALIGNMENT = 16  # elements: the bucket's tensors begin at multiples of it

Batch = dict[str, Tensor]


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, 3)
        self.excite = nn.Linear(3, channels)

    def forward(self, features: Tensor) -> Tensor:
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(features.mean(dim=(2, 3))))))
        return features * gate[:, :, None, None]


class ImageNetwork(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, width)
        self.attention = SqueezeExcite(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = self.attention(F.silu(self.norm(self.stem(images))))
        return self.head(features.amax(dim=(2, 3)))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"], label_smoothing=0.1)


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "images": torch.randn(IMAGES, 3, SIZE, SIZE, generator=generator),
        "labels": torch.randint(CLASSES, (IMAGES,), generator=generator),
    }


case = Case(model=ImageNetwork, batch=make_batch, loss=loss, layout="1x3")


def aligned(elements: int) -> int:
    """The elements that a tensor occupies in the bucket, with its padding."""
    return (elements + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class GradientBucket:
    """Copies gradients into one buffer, averages that, and copies them back."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        size = sum(aligned(parameter.numel()) for parameter in self.parameters)
        self.buffer = self.parameters[0].new_zeros(size)

    @torch.no_grad()
    def flatten(self) -> None:
        offset = 0
        for parameter in self.parameters:
            gradient = parameter.grad.flatten()
            self.buffer[offset : offset + gradient.numel()] = gradient
            offset += aligned(gradient.numel())

    @torch.no_grad()
    def unflatten(self) -> None:
        offset = 0
        for parameter in self.parameters:
            count = parameter.numel()
            parameter.grad.copy_(self.buffer[offset : offset + count].view_as(parameter))
            offset += count

    def average(self, world_size: int) -> None:
        self.flatten()
        dist.all_reduce(self.buffer)
        self.buffer /= world_size
        self.unflatten()


class ClassifierTrainer:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model = model
        self.world_size = rank.world_size
        self.bucket = GradientBucket(p for p in model.parameters() if p.requires_grad)

    def train_batch(self, batch: Batch) -> None:
        loss(self.model, batch).backward()
        self.bucket.average(self.world_size)


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ClassifierTrainer(model, rank).train_batch(shard)
