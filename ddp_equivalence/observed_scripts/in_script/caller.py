"""Which line of the user's code has called a function of torch that is watched."""

from __future__ import annotations

import sys
from types import FrameType

from ddp_equivalence.measurement.code_lines import lines_of
from ddp_equivalence.observed_scripts.in_script.real_files import real_file
from ddp_equivalence.observed_scripts.places import Place


def place_of_caller(made: object = None) -> Place:
    """The innermost line of the user's own code that is running. ``made``: an object that is being
    made; the lines of its own ``__init__`` do not count.
    """
    frame: FrameType | None = sys._getframe(1)
    outer = frame if made is not None else None
    while outer is not None:
        if outer.f_code.co_name == "__init__" and _first_argument(outer) is made:
            frame = outer.f_back
        outer = outer.f_back
    innermost, users = lines_of(frame)
    line = users or innermost
    return Place() if line is None else Place(real_file(line.file), line.number, line.function)


def _first_argument(frame: FrameType) -> object:
    """The ``self`` of a method that runs."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None
