"""Errors about wrong arguments, and the checks of plain values. Nothing here imports torch."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import SupportsIndex, cast

# Errors for a case that the caller must change, and for a mistake in this package.

LONGEST_VALUE = 160
"""Characters of a value that an error shows."""


class BadCase(ValueError):
    """The caller asked for something that cannot be checked.

    ``field`` is the argument at fault, ``value`` is what the caller gave, and ``right`` ends the
    sentence "it should be ...". ``at``: where in the value the mistake is, such as ``['rows']``.
    """

    def __init__(self, field: str, value: object, right: str, at: str = "") -> None:
        self.field, self.value, self.right = field, value, right
        super().__init__(f"{field}{at} is {on_one_line(repr(value))}; it should be {right}")

    def __reduce__(self) -> tuple[type[BadCase], tuple[str, str, str]]:
        # Errors cross processes by pickle, and the value may be an unpicklable function. So only
        # the text of the value is pickled.
        value = self.value if isinstance(self.value, str) else Words(self.value)
        return type(self), (self.field, value, self.right)


class Words(str):
    """Says in words what a value is, which an error shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def of_type(value: object) -> Words:
    """Words for a value that is too long to be shown."""
    return Words(f"of type {type(value).__name__}")


def one_of(names: Iterable[str], given: object) -> str:
    """``one of check, run``, and which of these names was probably meant."""
    known = list(names)
    near = get_close_matches(str(given), known, 1)
    return f"one of {', '.join(known)}" + "".join(f"; did you mean {one}?" for one in near)


def on_one_line(text: str) -> str:
    """The text of a value without line breaks, and cut where nobody would read on."""
    words = " ".join(text.split()) if "\n" in text else text
    return words if len(words) <= LONGEST_VALUE else f"{words[:LONGEST_VALUE]}..."


def it_raised(error: Exception) -> str:
    """``it raised ValueError: ...``, for the end of ``right``: a function of the caller raised."""
    text = f"it raised {type(error).__name__}: {error}"
    if "process group has not been initialized" in text:
        text += (
            " (the big batch is computed by one process without ranks: DistributedDataParallel and "
            "collectives belong in the step)"
        )
    return text


def what_is_hidden(folder: Path, text: str) -> str:
    """Says which file hides a module that the text of an error names, and what to do; else ""."""
    for name in (*sorted(sys.stdlib_module_names), "cuda", "numpy", "torch"):
        if (folder / f"{name}.py").is_file() and re.search(rf"['/]{name}\b", text):
            return f"\n{name}.py, in {folder}, hides a module of Python or torch: rename the file"
    return ""


class SuiteBug(RuntimeError):
    """This package itself has made a mistake. Please report it."""


# Numbers of Python and of other libraries, such as numpy's. This module imports no torch.


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
