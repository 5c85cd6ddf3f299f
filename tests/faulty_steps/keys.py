"""The faulty steps and their keys: what is wrong with each, where, and what makes it right."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence import check
from ddp_equivalence.report.verdict import Verdict

HERE = Path(__file__).resolve().parent
STEPS = HERE / "steps"


def keys_of(file: Path) -> list[dict[str, Any]]:
    """What a file of keys says of each step."""
    steps: list[dict[str, Any]] = tomllib.loads(file.read_text("utf-8"))["step"]
    return steps


KEYS = keys_of(HERE / "keys.toml")

every_key = pytest.mark.parametrize("key", KEYS, ids=[Path(key["file"]).stem for key in KEYS])


NEAR = 2
"""The faulty line is found if a line so near to it is shown."""


def lines_near(key: dict[str, Any], steps: Path = STEPS) -> set[int]:
    """The numbers of the lines near one that is wrong. ``steps``: the folder of the step."""
    faulty = {key["line"], *key.get("also", [])}
    text = (steps / key["file"]).read_text("utf-8").splitlines()
    wrong = [number for number, line in enumerate(text, 1) if line.strip() in faulty]
    return {near for number in wrong for near in range(number - NEAR, number + NEAR + 1)}


def lines_shown(file: str, report: str) -> list[int]:
    """The numbers of the lines of this file that a report shows, in its order."""
    return [int(one) for one in re.findall(rf"(?m)^[> ] \S*{re.escape(file)}:(\d+)  ", report)]


def is_shown(key: dict[str, Any], report: str, steps: Path = STEPS) -> bool:
    """True if the report shows the faulty line, or one near it."""
    return not lines_near(key, steps).isdisjoint(lines_shown(key["file"], report))


def verdict_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """The verdict on the step of a file, which stays imported until the test ends."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return check(module.case, module.step)
