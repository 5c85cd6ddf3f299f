"""A small convolutional network under DDP and torch.compile, with a config object for both."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

SIDE, CLASSES = 8, 5


class CompileOptions(NamedTuple):
    enabled: bool = True
    backend: str = "aot_eager"
    dynamic: bool = False


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, stride=2, padding=1),
            nn.GroupNorm(2, 6),
            nn.SiLU(),
            nn.Conv2d(6, 8, 3, stride=2, padding=1),
            nn.SiLU(),
        )
        self.classify = nn.Linear(8 * (SIDE // 4) ** 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images).flatten(1))


def images_and_labels(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.rand(20, 1, SIDE, SIDE, generator=generator)
    brightest = images.mean(dim=(1, 2)).argmax(dim=-1)
    return images, brightest % CLASSES


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, label_smoothing=0.1)


class Engine:
    """Owns the wrapped model, and the callable that the loop calls."""

    def __init__(self, model: nn.Module, compile_options: CompileOptions) -> None:
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.forward = self.ddp
        if compile_options.enabled:
            self.forward = torch.compile(
                self.ddp.module,
                backend=compile_options.backend,
                dynamic=compile_options.dynamic,
            )

    def unwrapped(self) -> nn.Module:
        """For checkpoints."""
        return self.ddp.module

    def backward(self, batch: tuple[Tensor, Tensor]) -> float:
        value = loss(self.forward, batch)
        value.backward()
        return value.item()


def step(model: nn.Module, shard: tuple[Tensor, Tensor], rank) -> None:
    engine = Engine(model, CompileOptions())
    engine.backward(shard)


case = Case(model=ConvNet, batch=images_and_labels, loss=loss, layout="1x2")
