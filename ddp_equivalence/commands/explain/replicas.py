"""nn.DataParallel's rule in one process on any device: scatter, run copies, gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

LossOf = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> scalar."""


class OutputsOfReplicas(nn.Module):
    """Inputs (examples, ...) to the gathered outputs of ``count`` copies of the model.

    Every copy has weights cloned from the model's, so that backward adds up what all of them find,
    as the backward of DataParallel's broadcast does.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model, self.count = model, count

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([_copy(self.model)(part) for part in inputs.chunk(self.count)])


class LossesOfReplicas(nn.Module):
    """A batch of inputs and targets to the losses of ``count`` copies, shape (copies,)."""

    def __init__(self, model: nn.Module, count: int, loss: LossOf) -> None:
        super().__init__()
        self.model, self.count, self.loss = model, count, loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        parts = zip(inputs.chunk(self.count), targets.chunk(self.count), strict=True)
        return torch.stack([self.loss(_copy(self.model)(own), wanted) for own, wanted in parts])


def _copy(model: nn.Module) -> Callable[[Tensor], Any]:
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    return lambda inputs: functional_call(model, weights, (inputs,))
