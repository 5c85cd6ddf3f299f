"""The smallest faults that are still caught: a factor on all gradients, and one wrong element."""

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
"""Exponents of the smallest and largest power of two that are tried."""

MODEL, LOSS, LAYOUT = "mlp", "mse_mean", "2x2"


@dataclass(frozen=True)
class Sensitivity:
    """The smallest faults that are caught with one dtype.

    Each is a power of two, or inf if even a fault of size 1 is missed.

    ``factor`` is how far a factor on all gradients is from 1. ``element`` is the error of one
    element, relative to the root mean square of its parameter's gradient.
    """

    dtype: torch.dtype
    factor: float
    element: float


def sensitivities() -> Iterator[Sensitivity]:
    """The sensitivity with each dtype, on the catalogue's MLP."""
    for dtype in DTYPES:
        yield Sensitivity(dtype, _smallest(dtype, off_by_a_factor), _smallest(dtype, one_element))


def off_by_a_factor(delta: float) -> Step:
    """A step that leaves 1 + delta times the right gradients."""
    return _changed(lambda gradient: gradient.mul_(1 + delta))


def one_element(delta: float) -> Step:
    """A step that leaves right gradients, except for one element of each matrix.

    The error of that element is delta times the root mean square of the matrix.
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


def _smallest(dtype: torch.dtype, make_step: Callable[[float], Step]) -> float:
    """The smallest delta that is caught.

    Bisection finds it; this assumes that every delta is caught that is larger than a caught one.
    """
    case = Case(model=MODEL, loss=LOSS, layout=LAYOUT, dtype=dtype)
    missed, caught_at = SMALLEST - 1, LARGEST + 1
    while caught_at - missed > 1:
        middle = (missed + caught_at) // 2
        caught = check(case, make_step(2.0**middle)).outcome == "different"
        missed, caught_at = (missed, middle) if caught else (middle, caught_at)
    return inf if caught_at > LARGEST else 2.0**caught_at
