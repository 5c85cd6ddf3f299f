"""An error of this package while it looks for lines must not hide that a step differs."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ddp_equivalence.diagnosis.time_left import OutOfTime

Found = TypeVar("Found")

are_raised = False
"""True in the tests of this package, which are to fail by such an error."""


def unless_it_fails(look: Callable[[], Found], otherwise: Callable[[str], Found]) -> Found:
    """What ``look()`` returns. If it raises, ``otherwise`` is given the error as a clause.

    Raises OutOfTime, and any error in the tests of this package.
    """
    try:
        return look()
    except OutOfTime:
        raise
    except Exception as error:
        if are_raised:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return otherwise(
            f"this package failed while it looked ({type(error).__name__}: {error}, at {place}); "
            "please report this"
        )
