"""Files and folders for results.

A command asks whether it can write them before it starts its work, so that no result is lost.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ddp_equivalence.case.errors import BadCase


def require_writable_file(field: str, path: Path | None) -> None:
    """Raises BadCase if a path is given and no file can be written there."""
    if path is None:
        return
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BadCase(field, str(path), "a file in a folder that exists and can be written to")


def require_writable_folder(field: str, path: Path | None) -> None:
    """Raises BadCase if a path is given and no folder that can be written to is or can be there."""
    if path is None:
        return
    whole = path.resolve()
    nearest = next(folder for folder in (whole, *whole.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise BadCase(field, str(path), "a folder that can be written to, or that can be made")


def write_json(field: str, path: Path | None, content: object) -> None:
    """Write the file if a path is given. Raises BadCase if that fails after all."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise BadCase(field, str(path), f"a file that can be written; {error}") from error
