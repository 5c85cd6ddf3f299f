"""Models that draw random numbers: the big batch that draws those of the ranks has their gradients.

``--verify`` cannot run them, since the big batch in plain torch draws others.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.programs.common import (
    HIDDEN,
    LENGTH,
    OUTPUTS,
    ROW,
    TOKENS,
    images,
    sequences,
    words,
)
from benchmarks.programs.program import Programs

programs = Programs("random numbers", right=True)


@programs.model(is_verified=False)
def dropout_in_training() -> nn.Module:
    """nn.Dropout draws its masks on each rank."""
    return nn.Sequential(nn.Linear(ROW, HIDDEN), nn.Dropout(0.3), nn.Linear(HIDDEN, OUTPUTS))


@programs.model(batch=images, is_verified=False)
def dropped_channels() -> nn.Module:
    """nn.Dropout2d draws its channels on each rank."""
    layers = (nn.Conv2d(2, 4, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(64, OUTPUTS))
    return nn.Sequential(*layers)


@programs.model(batch=words, is_verified=False)
class WordsDropped(nn.Module):
    """Words are dropped at random, each rank's by its own draws."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(TOKENS, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, tokens: Tensor) -> Tensor:
        kept = torch.rand(tokens.shape) > 0.3
        return self.last((self.table(tokens) * kept[..., None]).sum(1) / LENGTH)


@programs.model(batch=sequences, is_verified=False)
class LayersDroppedByChance(nn.Module):
    """A layer is dropped for single examples, by draws of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(ROW, ROW), nn.Linear(ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        kept = torch.rand(len(rows), 1, 1) > 0.4
        return self.second(rows + kept * self.first(rows)).mean(1)


@programs.model(steps=3, layout="1x2", is_verified=False)
def dropout_in_three_steps() -> nn.Module:
    """nn.Dropout draws in each of three steps, which are compared without it."""
    return nn.Sequential(nn.Linear(ROW, HIDDEN), nn.Dropout(0.3), nn.Linear(HIDDEN, OUTPUTS))


@programs.model(is_verified=False)
class NoiseOfALatentVector(nn.Module):
    """Noise is added to what is between encoder and decoder, as in a variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(ROW, 2 * HIDDEN), nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        mean, logarithm = self.first(rows).chunk(2, -1)
        return self.second(mean + torch.randn_like(mean) * (0.5 * logarithm).exp())
