"""Numbers of Python and of other libraries, such as numpy's. This module imports no torch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Real
from typing import SupportsIndex, cast


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
