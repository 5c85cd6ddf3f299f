"""Arguments whose type is wrong: what the caller has probably meant, as an error says it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Real
from typing import SupportsIndex, cast

import torch
from torch import nn


def whole_number(value: object) -> int | None:
    """The value as an int if it is an integer, of Python or of another library; else None."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(cast(SupportsIndex, value))
    except TypeError:
        return None


def whole_numbers(value: object) -> tuple[int, ...] | None:
    """The values as ints if it is a list or tuple of integers, and not empty; else None."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return None
    numbers = [whole_number(one) for one in value]
    return tuple(one for one in numbers if one is not None) if None not in numbers else None


def is_number(value: object) -> bool:
    """True for a real number, of Python or of another library, that is no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)


def dtype_named(value: object) -> torch.dtype | None:
    """The floating-point dtype of torch with this name, as in ``"float32"``; None if it is none."""
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def instead_of_model(model: object) -> str:
    """What a model must be, if it is a module and not a function that builds one; else ""."""
    if not isinstance(model, nn.Module):
        return ""
    return (
        "a function that builds the model, because every process builds its own: "
        f"model=lambda: {type(model).__name__}(...)"
    )


def instead_of_loss(loss: object) -> str:
    """What a loss must be, if it is one of torch's losses, which take other arguments; else ""."""
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    if not str(getattr(kind, "__module__", "")).startswith("torch.nn."):
        return ""
    name = str(getattr(kind, "__name__", "loss"))
    call = f"{name}()" if isinstance(kind, type) else name
    return (
        "a function (model, batch) -> scalar tensor, which calls the model itself: "
        f'loss=lambda model, batch: {call}(model(batch["inputs"]), batch["targets"])'
    )
