"""What a run is asked to check."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddp_equivalence.case.errors import BadCase

PartOfSuite = Literal["none", "pairwise", "all"]
"""How much of the suite runs. With ``-k`` it is "all", of those tests that its words select."""


def part_of_suite(*, is_run: bool, whole: bool) -> PartOfSuite:
    """The part that is run. ``whole``: as the option ``--all`` asks for."""
    if not is_run:
        return "none"
    return "all" if whole else "pairwise"


@dataclass(frozen=True)
class Given:
    """One PATH of the command line. ``is_test``: pytest collects it; else it is for ``check``."""

    text: str
    file: Path
    is_test: bool


def given(text: str) -> Given:
    """``tests/``, ``test_a.py``, ``test_a.py::test_b``, ``mine.py`` or ``mine.py:step``.

    Raises BadCase for what is none of these, or does not exist.
    """
    name, colons, _ = text.partition("::")
    step = ""
    if not colons and ".py:" in text:
        name, _, step = text.rpartition(":")
    path = Path(name)
    if not path.exists():
        raise BadCase("PATH", text, "a file or folder that exists")
    if path.is_file() and path.suffix != ".py":
        raise BadCase("PATH", text, "a folder, or a file of Python")
    is_test = path.name.startswith("test_") or path.stem.endswith("_test")
    if colons and not is_test:
        raise BadCase("PATH", text, f"{name}:STEP for a step of a file for `check`")
    return Given(text, path, path.is_dir() or (is_test and not step))


def asked(
    paths: Sequence[str], commands: Sequence[str], words: str, suite: PartOfSuite
) -> Mapping[str, Any]:
    """What the first line of a record says of it, with a digest of the files. What these import
    is not in the digest. Raises BadCase.
    """
    hashed = hashlib.sha256()
    for text in paths:
        file = given(text).file
        for one in sorted(file.rglob("*.py")) if file.is_dir() else [file]:
            hashed.update(f"{one.as_posix()}\n".encode() + one.read_bytes())
    return {
        "suite": suite,
        "paths": list(paths),
        "observed": list(commands),
        "selected": words,
        "files": hashed.hexdigest()[:32],
    }
