"""The line of the user's own code that called a function of torch or of this package."""

from __future__ import annotations

import os
from types import FrameType

from ddp_equivalence.ranks.importable import belongs_to_user


def users_line(frame: FrameType | None) -> str:
    """The innermost line of the user's code, as ``file:line``; "" if there is none."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith("<") and belongs_to_user(path):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
