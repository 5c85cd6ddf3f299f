"""Whether results can be written to a path. It is tried, since permissions alone do not tell."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

FILE = "a file in a folder that exists and can be written to"
FOLDER = "a folder that can be written to, or that can be made"


def why_no_file(path: Path) -> str:
    """Why no file can be written there; "" if one can. An existing file keeps its content."""
    folder = path.resolve().parent
    if path.is_dir():
        return "it is a folder"
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if path.exists() and not path.is_file():
        # The reader of a pipe would take the end of the attempt for the end of the results.
        return "" if os.access(path, os.W_OK) else "writing is not permitted"
    existed = path.exists()
    try:
        with path.open("a"):
            pass
        if not existed:
            path.unlink(missing_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def why_no_folder(path: Path) -> str:
    """Why no files can be written to such a folder, which may not exist yet; "" if they can."""
    whole = path.resolve()
    try:
        nearest = next(folder for folder in (whole, *whole.parents) if folder.exists())
        if not nearest.is_dir():
            return f"{nearest} is no folder"
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        return error.strerror or str(error)
    return ""
