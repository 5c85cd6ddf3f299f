"""Compares the buffers that the ranks are left with, such as running statistics, with those of the
big batch. They are no gradients: another value there is a property of the model, and no fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.measurement.work import Evidence

MOST_ROUNDINGS = 1e3
"""So many times the precision of its dtype a buffer may be off, relative to its norm."""


@dataclass(frozen=True)
class BufferBeside:
    """A buffer that is not what one big batch leaves.

    ``error``: ||held - big batch|| / ||big batch|| on the rank where it is largest. ``ranks``: on
    which it is not the same.
    """

    name: str
    error: float
    ranks: tuple[int, ...]


def buffers_beside(
    expected: Mapping[str, Tensor], evidence: Mapping[int, Evidence]
) -> tuple[BufferBeside, ...]:
    """The buffers that differ from those of the big batch, in the order of the model."""
    found = []
    for name, right in expected.items():
        held = ((rank, one.buffers_left.get(name)) for rank, one in evidence.items())
        errors = {
            rank: error
            for rank, value in held
            if value is not None and (error := error_of(value, right)) > 0
        }
        if errors:
            found.append(BufferBeside(name, max(errors.values()), tuple(errors)))
    return tuple(found)


def error_of(held: Tensor, right: Tensor) -> float:
    """How far a buffer is off, relative to the right one's norm; 0 if that is only rounding."""
    if held.shape != right.shape:
        return float("inf")
    is_float = held.is_floating_point()
    wide = torch.float64 if not (held.is_complex() or right.is_complex()) else torch.complex128
    difference, norm = float((held.to(wide) - right.to(wide)).norm()), float(right.to(wide).norm())
    error = difference / norm if norm else difference
    rounding = MOST_ROUNDINGS * torch.finfo(held.dtype).eps if is_float else 0.0
    return error if error > rounding else 0.0


def text_of_buffers(found: Iterable[BufferBeside]) -> str:
    """The names and errors, such as ``1.running_mean by 3.1e-01``."""
    return ", ".join(f"{one.name} by {text_of(one.error, '.1e')}" for one in found)
