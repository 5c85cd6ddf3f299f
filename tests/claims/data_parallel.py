"""nn.DataParallel's rule written out for the CPU, where the class itself just calls the module."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call


class DataParallelRule(nn.Module):
    """Scatters its inputs, calls a copy of the module on each chunk, gathers the outputs.

    The copies' gradients are added up in the module: each weight of a copy is a clone, and the
    gradients of clones add. ``divide_by``: what nn.DataParallel does not do; 1 is its rule.
    Losses of shape () are gathered into a row with one loss per copy.
    """

    def __init__(self, module: nn.Module, gpus: int, divide_by: int = 1) -> None:
        super().__init__()
        self.module = module
        self.gpus = gpus
        self.divide_by = divide_by
        self.copies: list[dict[str, Tensor]] = []

    def forward(self, *inputs: Tensor) -> Tensor:
        chunks = list(zip(*(one.chunk(self.gpus) for one in inputs), strict=True))
        self.copies = [self._copy() for _ in chunks]
        outputs = [
            functional_call(self.module, copy, chunk)
            for copy, chunk in zip(self.copies, chunks, strict=True)
        ]
        return torch.stack(outputs) if outputs[0].dim() == 0 else torch.cat(outputs)

    def gradients_of_copies(self) -> list[Tensor]:
        """After backward: what each copy found, all parameters in one row."""
        return [
            torch.cat(
                [weight.grad.flatten() for weight in copy.values() if weight.grad is not None]
            )
            for copy in self.copies
        ]

    def _copy(self) -> dict[str, Tensor]:
        copy = {}
        for name, parameter in self.module.named_parameters():
            weight = copy[name] = parameter.clone()
            weight.register_hook(self._scaled)
            weight.retain_grad()
        return copy

    def _scaled(self, gradient: Tensor) -> Tensor:
        return gradient / self.divide_by


class LossInside(nn.Module):
    """A module that returns its loss, as many wrap theirs to save memory on the first GPU."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(rows), targets)
