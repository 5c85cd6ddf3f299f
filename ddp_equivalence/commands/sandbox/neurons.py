"""Many independent neurons ``y = w x`` in one model, each an experiment of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Neurons(nn.Module):
    """``count`` neurons of one weight each, 1 at the start, float64."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs and outputs of shape (batch, count)."""
        return self.weight * inputs


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The L1 loss of each neuron, a mean over its batch, summed over the neurons.

    No neuron's loss depends on another's weight, so each gets the gradient that it would get alone.
    """
    return F.l1_loss(outputs, targets, reduction="none").mean(0).sum()
