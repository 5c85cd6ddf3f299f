"""Gradients by parameter name, and the few operations that comparing them needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Gradients = Mapping[str, Tensor | None]

"""Parameter name -> gradient, or None where backward left none."""


@dataclass(frozen=True)
class Description:
    """What a gradient is, without its values; ``layout`` is ``strided`` or ``sparse_coo``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "strided"

    def __str__(self) -> str:
        layout = "" if self.layout == "strided" else f", {self.layout}"
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}{layout}"


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradient of every parameter, shared parameters once, under their first name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def updates_of(model: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """Weights now minus ``before``; None for parameters that require no gradient."""
    return {
        name: parameter.detach() - before[name] if parameter.requires_grad else None
        for name, parameter in model.named_parameters()
    }


def sgd_step(model: nn.Module, lr: float) -> None:
    """Plain SGD: no momentum, no decay, nothing that hides a factor."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-lr)


def dense(gradient: Tensor) -> Tensor:
    """Detached, and dense if it was sparse."""
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


def describe(gradients: Gradients) -> dict[str, Description | None]:
    """The description of every gradient, None where there is none."""
    return {
        name: None
        if gradient is None
        else Description(
            tuple(gradient.shape), gradient.dtype, str(gradient.layout).removeprefix("torch.")
        )
        for name, gradient in gradients.items()
    }
