"""What a run is asked to check."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def asked(
    paths: Sequence[str], commands: Sequence[str], words: str, *, with_suite: bool
) -> Mapping[str, Any]:
    """What the first line of a record says of it, with a digest of the files. What these import
    is not in the digest.
    """
    hashed = hashlib.sha256()
    for text in paths:
        path = Path(text if text.endswith(".py") else text.partition("::")[0].rpartition(":")[0])
        path = path if path.exists() else Path(text)
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.is_file() else []
        for file in files:
            hashed.update(f"{file.as_posix()}\n".encode() + file.read_bytes())
    return {
        "suite": with_suite,
        "paths": list(paths),
        "observed": list(commands),
        "selected": words,
        "files": hashed.hexdigest()[:32],
    }
