"""Combinations of parameters: which of them run in every change, and which only thoroughly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def each_once(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """Every row with every column, as parameters of a test. Both may be tuples of several.

    So few run in every change that each row and each column is among them. The others have the mark
    ``thorough``.
    """
    length = max(len(rows), len(columns))
    chosen = {(number % len(rows), number % len(columns)) for number in range(length)}
    return [
        pytest.param(
            *_values(row), *_values(column), marks=() if place in chosen else pytest.mark.thorough
        )
        for place, row, column in (
            ((i, j), row, column) for i, row in enumerate(rows) for j, column in enumerate(columns)
        )
    ]


def _values(one: Any) -> tuple[Any, ...]:
    return one if isinstance(one, tuple) else (one,)
