"""Recognises a tensor whose elements were picked from gradients, such as some rows of one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ddp_equivalence.measurement.plain_tensors import NotPlain, plain
from ddp_equivalence.measurement.trace import thinned
from ddp_equivalence.ranks.issued_collectives import Issued

FEWEST = 4
"""So many different numbers that are not zero must be found in the gradients."""

MOST_KEPT = 128
"""So many elements of a tensor are looked for, at equal distances."""

MOST_ELEMENTS = 2_000_000
"""Larger gradients are not searched."""


def parts_of(issued: Issued, gradients: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The parameters whose gradients hold all elements of what goes into a collective; () if some
    are in none. The elements may have been divided by the number of ranks already.
    """
    found = [thinned(one.detach().reshape(-1), MOST_KEPT) for one in issued.tensors if one.numel()]
    if not found or not all(one.is_floating_point() for one in found):
        return ()
    eps = max(torch.finfo(one.dtype).eps for one in found)
    wanted = torch.cat([one.to("cpu", torch.float64) for one in found])
    wanted = torch.unique(wanted[wanted != 0])
    if len(wanted) < FEWEST or not bool(wanted.isfinite().all()):
        return ()
    values = {name: value for name, one in gradients.items() if len(value := _values(one))}
    if sum(map(len, values.values())) > MOST_ELEMENTS:
        return ()
    for divisor in {1, len(issued.ranks)}:
        held = {name: _held(divisor * wanted, one, eps) for name, one in values.items()}
        if held and bool(torch.stack([*held.values()]).any(0).all()):
            return tuple(name for name, of_name in held.items() if bool(of_name.any()))
    return ()


def _held(wanted: Tensor, values: Tensor, eps: float) -> Tensor:
    """Which of these ascending numbers are among the values, up to rounding."""
    at = torch.searchsorted(wanted, values)
    is_held = torch.zeros(len(wanted), dtype=torch.bool)
    for nearest in (at.clamp(max=len(wanted) - 1), (at - 1).clamp(min=0)):
        near = (values - wanted[nearest]).abs() <= 4 * eps * values.abs()
        is_held[nearest[near]] = True
    return is_held


def _values(gradient: Tensor) -> Tensor:
    try:
        return plain(gradient.detach()).to("cpu").reshape(-1).double()
    except (NotPlain, RuntimeError):  # it has no values of its own, or is sparse
        return torch.empty(0, dtype=torch.float64)
