"""Combinations of parameters: which of them run in every change, and which only thoroughly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

THOROUGH = pytest.mark.thorough


def each_once(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """Every row with every column, as parameters of a test. Both may be tuples of several.

    So few run in every change that each row and each column is among them. The others have the mark
    ``thorough``.
    """
    length = max(len(rows), len(columns))
    chosen = {(number % len(rows), number % len(columns)) for number in range(length)}
    return [
        pytest.param(*_values(row), *_values(column), marks=() if place in chosen else THOROUGH)
        for place, row, column in (
            ((i, j), row, column) for i, row in enumerate(rows) for j, column in enumerate(columns)
        )
    ]


def one_of_each(kind: Callable[[Any], Any], rows: Iterable[Any]) -> list[Any]:
    """All rows, as parameters of a test. Of each kind, the first runs in every change; the others
    have the mark ``thorough``.
    """
    seen, parameters = set[Any](), []
    for row in rows:
        is_first = kind(row) not in seen
        seen.add(kind(row))
        parameters.append(pytest.param(*_values(row), marks=() if is_first else THOROUGH))
    return parameters


def _values(one: Any) -> tuple[Any, ...]:
    return one if isinstance(one, tuple) else (one,)
