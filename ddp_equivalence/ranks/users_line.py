"""The line of the user's own code that called a function of torch or of this package."""

from __future__ import annotations

import os
from types import FrameType

from ddp_equivalence.ranks.importable import belongs_to_user


def users_line(frame: FrameType | None) -> str:
    """The innermost line of the user's code, as ``file:line``; "" if there is none."""
    path, number, _ = users_place(frame)
    return f"{os.path.basename(path)}:{number}" if path else ""


def users_place(frame: FrameType | None) -> tuple[str, int, str]:
    """The file, number and function of the innermost line of the user's code; "" if none."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith("<") and belongs_to_user(path):
            return path, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "", 0, ""
