"""A small convolutional network on images of one channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_equivalence.case.models.model import OUTPUT_SIZE, CatalogueModel

IMAGE_SIZE = 9


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 5, kernel_size=3),
        nn.ReLU(),
        nn.Conv2d(5, 7, kernel_size=3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(7 * 3 * 3, OUTPUT_SIZE),
    )


def images(generator: torch.Generator, examples: int) -> Tensor:
    """Shape (examples, 1, IMAGE_SIZE, IMAGE_SIZE)."""
    return torch.randn(examples, 1, IMAGE_SIZE, IMAGE_SIZE, generator=generator)


MODEL = CatalogueModel("conv", build, inputs=images)
