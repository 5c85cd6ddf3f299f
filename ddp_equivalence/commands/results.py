"""Files and folders for results.

A command asks whether it can write them before it starts its work, so that no result is lost.
"""

from __future__ import annotations

import json
from pathlib import Path

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.report.output_paths import FILE, FOLDER, why_no_file, why_no_folder


def require_writable_file(field: str, path: Path | None) -> None:
    """Raises BadCase if a path is given and no file can be written there."""
    if path is not None and (reason := why_no_file(path)):
        raise BadCase(field, str(path), f"{FILE}; {reason}")


def require_writable_folder(field: str, path: Path | None) -> None:
    """Raises BadCase if a path is given that is not a writable folder and cannot become one."""
    if path is not None and (reason := why_no_folder(path)):
        raise BadCase(field, str(path), f"{FOLDER}; {reason}")


def write_json(field: str, path: Path | None, content: object) -> None:
    """Write the file if a path is given. Raises BadCase if that fails after all."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise BadCase(field, str(path), f"a file that can be written; {error.strerror}") from error
