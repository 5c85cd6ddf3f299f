"""Many independent neurons ``y = w x`` in one model; each neuron is one experiment."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Neurons(nn.Module):
    """``count`` neurons with one float64 weight each, which is 1 at the start."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs and outputs of shape (batch, count)."""
        return self.weight * inputs


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The L1 loss of each neuron, a mean over its batch, summed over the neurons.

    The loss of a neuron depends on no other weight, so each neuron gets the gradient that it would
    get alone.
    """
    return F.l1_loss(outputs, targets, reduction="none").mean(0).sum()
