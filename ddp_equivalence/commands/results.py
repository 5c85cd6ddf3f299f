"""Where results are to be written: looked at before the work is done, so that none is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ddp_equivalence.case.errors import BadCase


def look_at_file(field: str, path: Path | None) -> None:
    """Raises BadCase where no file can be written."""
    if path is None:
        return
    folder = path.resolve().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BadCase(field, str(path), "a file in a folder that is there and can be written to")


def look_at_folder(field: str, path: Path | None) -> None:
    """Raises BadCase where no folder is or can be made."""
    if path is None:
        return
    there = next(one for one in (path.resolve(), *path.resolve().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise BadCase(field, str(path), "a folder that is there or can be made, to write to")


def write_json(field: str, path: Path | None, data: object) -> None:
    """If there is a path. Raises BadCase if that fails after all."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise BadCase(field, str(path), f"a file that can be written; {error}") from error
