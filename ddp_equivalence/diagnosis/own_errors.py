"""An error of this package while it explains a difference must not hide that a step differs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ddp_equivalence.diagnosis.time_left import OutOfTime

Found = TypeVar("Found")

_are_raised = [False]
"""The last entry is in force. Each ``own_errors_raised`` adds one while its block runs."""


@contextmanager
def own_errors_raised(are_raised: bool = True) -> Iterator[None]:
    """Inside the block, errors of the explanation are raised, as in the tests of this package."""
    _are_raised.append(are_raised)
    try:
        yield
    finally:
        _are_raised.pop()


def unless_it_fails(look: Callable[[], Found], otherwise: Callable[[str], Found]) -> Found:
    """Return what ``look()`` returns. If it raises, ``otherwise`` is given the error as a clause.

    Raises OutOfTime, and any error inside ``own_errors_raised``.
    """
    try:
        return look()
    except OutOfTime:
        raise
    except Exception as error:
        if _are_raised[-1]:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return otherwise(
            f"this package failed while it looked ({type(error).__name__}: {error}, at {place}); "
            "please report this"
        )
