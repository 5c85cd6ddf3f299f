"""How small a fault is still caught: a factor on everything, and one wrong element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import nn

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.check_equivalence import check
from ddp_equivalence.measurement.work import Step
from ddp_equivalence.ranks import Rank
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SMALLEST, LARGEST = -52, 0
"""Powers of two between which is searched."""

MODEL, LOSS, LAYOUT = "mlp", "mse_mean", "2x2"


@dataclass(frozen=True)
class Sensitivity:
    """In one type: the smallest ``factor - 1`` that is caught, and the smallest error of one
    ``element``, over the root mean square of its parameter. Powers of two; inf if not even 1 is.
    """

    dtype: torch.dtype
    factor: float
    element: float


def sensitivities() -> Iterator[Sensitivity]:
    """Of every type, on the catalogue's MLP."""
    for dtype in DTYPES:
        yield Sensitivity(dtype, _smallest(dtype, off_by_a_factor), _smallest(dtype, one_element))


def off_by_a_factor(delta: float) -> Step:
    """A right step whose gradient is 1 + delta times what it should be."""
    return _changed(lambda gradient: gradient.mul_(1 + delta))


def one_element(delta: float) -> Step:
    """A right step with one element wrong, by delta times the root mean square of all of its
    parameter.
    """

    def change(gradient: torch.Tensor) -> None:
        if gradient.ndim == 2:
            gradient[1, 2] += delta * gradient.square().mean().sqrt()

    return _changed(change)


def _changed(change: Callable[[torch.Tensor], Any]) -> Step:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        LOSSES[LOSS](model, shard).backward()
        reduce_gradients(model, rank.world_size)
        for parameter in model.parameters():
            if parameter.grad is not None:
                change(parameter.grad)

    return step


def _smallest(dtype: torch.dtype, planted: Callable[[float], Step]) -> float:
    """By bisection: what is caught at some size is caught at every larger one."""
    case = Case(model=MODEL, loss=LOSS, layout=LAYOUT, dtype=dtype)
    below, above = SMALLEST - 1, LARGEST + 1
    while above - below > 1:
        middle = (below + above) // 2
        caught = check(case, planted(2.0**middle)).outcome == "different"
        below, above = (below, middle) if caught else (middle, above)
    return inf if above > LARGEST else 2.0**above
