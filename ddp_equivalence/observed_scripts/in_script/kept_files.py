"""Keeps the user's files as they are, while a script runs in a copy of its folder made of links.

Python announces every file that it opens. A link that is about to be written through is replaced by
a copy of its file first. Source: docs.python.org/3/library/audit_events.html.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import torch

WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_TRUNC | os.O_CREAT


def keep_files(folder: str) -> None:
    """From now on, no link in this folder is written through."""
    inside = os.path.join(os.path.realpath(folder), "")

    def before_open(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = any(one in mode for one in "wax+") if isinstance(mode, str) else flags & WRITES
            if writes and isinstance(path, str | bytes | os.PathLike):
                own_copy(os.fsdecode(path), inside)

    sys.addaudithook(before_open)
    save = torch.save

    def saved(obj: Any, f: Any, *arguments: Any, **named: Any) -> None:
        if isinstance(f, str | os.PathLike):
            own_copy(os.fsdecode(f), inside)  # torch writes such files without Python
        save(obj, f, *arguments, **named)

    torch.save = saved


def own_copy(path: str, inside: str) -> None:
    """If the path is a link to a file in the folder, put a copy of the file in its place."""
    if not os.path.islink(path):
        return
    folder = os.path.join(os.path.realpath(os.path.dirname(path) or "."), "")
    if not folder.startswith(inside):
        return
    target = os.path.realpath(path)
    os.unlink(path)
    if os.path.isfile(target):
        shutil.copyfile(target, path)
