"""Write plain values as Python source."""

from __future__ import annotations

import math
from typing import Any

import torch

from ddp_equivalence.report.script.slicing.no_source import NoSource


def literal(value: Any) -> str:
    """Source for a value: a number, text, a dtype, a device, or a container of these.

    Raises NoSource for anything else.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or value is ... or type(value) in (bool, int, float, complex, str, bytes):
        return "..." if value is ... else repr(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    if type(value) in (range, slice):
        return repr(value)
    if type(value) is tuple:
        items = ", ".join(map(literal, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if type(value) is list:
        return f"[{', '.join(map(literal, value))}]"
    if type(value) in (set, frozenset):
        return f"{type(value).__name__}([{', '.join(sorted(map(literal, value)))}])"
    if type(value) is dict:
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    raise NoSource(f"it uses a {type(value).__name__}, which cannot be written as source")


def indices_literal(indices: tuple[int, ...]) -> str:
    """``range(...)`` where the indices are evenly spaced, else the list of them."""
    if not indices:
        return "range(0)"
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    if step > 0 and tuple(range(indices[0], indices[0] + step * len(indices), step)) == indices:
        bounds = f"{indices[0]}, {indices[-1] + 1}"
        return f"range({bounds})" if step == 1 else f"range({bounds}, {step})"
    return f"[{', '.join(map(str, indices))}]"
