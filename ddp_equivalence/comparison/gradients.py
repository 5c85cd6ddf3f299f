"""Gradients by parameter name, and the few operations on them that a comparison needs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ddp_equivalence.case.steps import GradientKey

Gradients = Mapping[GradientKey, Tensor | None]
"""(step, parameter name) -> gradient, or None where backward left none."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Description:
    """Shape, dtype and layout of a gradient; ``layout`` is ``strided`` or ``sparse_coo``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "strided"

    def __str__(self) -> str:
        layout = "" if self.layout == "strided" else f", {self.layout}"
        return f"{self.shape} {self.dtype_name}{layout}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_sparse(self) -> bool:
        return self.layout != "strided"


def in_first_step(by_name: Mapping[str, Tensor | None]) -> dict[GradientKey, Tensor | None]:
    """The same, by step and name: updates are those of all steps, and count as the first step."""
    return {(0, name): tensor for name, tensor in by_name.items()}


def weights_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def updates_of(
    parameters: Mapping[str, nn.Parameter], before: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """How far every parameter has moved; its value, if it was not there before."""
    return {
        name: update_of(
            gathered(parameter.detach()), before.get(name), frozen=not parameter.requires_grad
        )
        for name, parameter in parameters.items()
    }


def update_of(weight: Tensor, before: Tensor | None, frozen: bool) -> Tensor | None:
    """The weight minus the one before; None for a parameter that is frozen and has not moved.

    A frozen parameter may have moved: if it was frozen after its training, or if it should not have
    been trained.
    """
    if before is None:
        return weight
    return None if frozen and bool((weight == before).all()) else weight - before


def sgd_step(model: nn.Module, lr: float) -> None:
    """SGD without momentum or weight decay, so that no wrong factor on the gradient is hidden."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-lr)


def gathered(tensor: Tensor) -> Tensor:
    """The tensor; if it is sharded over ranks, as FSDP2 leaves gradients, all of it on each rank.

    All ranks must call this for the same tensors in the same order, since they gather the shards.
    """
    gather = getattr(tensor, "full_tensor", None)  # of DTensor, which takes half a second to import
    return tensor if gather is None else gather()


def dense(gradient: Tensor) -> Tensor:
    """The gradient without its graph, and dense if it was sparse; of a sharded one, this rank's
    shard.
    """
    gradient = getattr(gradient, "to_local", lambda: gradient)().detach()
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


def describe(gradients: Mapping[Key, Tensor | None]) -> dict[Key, Description | None]:
    """The description of every gradient; None for a gradient that is None."""
    return {
        key: None
        if gradient is None
        else Description(
            tuple(gradient.shape), gradient.dtype, str(gradient.layout).removeprefix("torch.")
        )
        for key, gradient in gradients.items()
    }
