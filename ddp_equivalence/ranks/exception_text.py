"""Describes an exception on a rank as text that can be sent to the judging process."""

from __future__ import annotations

import linecache
import os
import re
import time
import traceback
from pathlib import Path

from ddp_equivalence.ranks.collectives import last_collective
from ddp_equivalence.ranks.messages import Raised

PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"


def describe_exception(error: BaseException) -> Raised:
    """The exception with its traceback, its innermost line outside torch, the last collective."""
    text = "".join(_from_the_users_code(error).format())
    outside_torch = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if f"{os.sep}torch{os.sep}" not in frame.filename
    ]
    line = ""
    if outside_torch:
        frame = outside_torch[-1]
        source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
        line = f"{frame.filename}:{frame.lineno}: {source}"
    what = "".join(traceback.format_exception_only(error)).strip()
    return Raised(what, text, line, time.monotonic(), last_collective())


def _from_the_users_code(error: BaseException) -> traceback.TracebackException:
    """The traceback without the frames of this package that led to the user's code."""
    described = traceback.TracebackException.from_exception(error)
    frames = list(described.stack)
    while frames and frames[0].filename.startswith(PACKAGE):
        frames.pop(0)
    if frames:
        described.stack = traceback.StackSummary.from_list(frames)
    return described


def is_describing_exception(stack: str) -> bool:
    """True if a stack of faulthandler shows that the rank was inside ``describe_exception``."""
    frame = r'exception_text\.py", line \d+ in describe_exception$'
    return re.search(frame, stack, re.MULTILINE) is not None
