"""Faulty steps and their keys: what is wrong with each, where, and what makes it right.

``known`` are 240 steps with which rules were made, by authors who knew none of the causes, and
``opened`` newer ones, which were read after they had been counted once. Each folder of
benchmarks/unseen_steps is a set that who writes rules does not read. ``right_sharded`` are sixty
right programs by the authors of those steps of ``opened`` whose names begin with s.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from ddp_equivalence import check
from ddp_equivalence.case import settings
from ddp_equivalence.report.verdict import Verdict

KNOWN = Path(__file__).resolve().parent / "known"
OPENED = Path(__file__).resolve().parent / "opened"
RIGHT_SHARDED = Path(__file__).resolve().parent / "right_sharded"
UNSEEN = Path(__file__).resolve().parents[1] / "unseen_steps"

NEAR = 2
"""The faulty line is found if a line so near to it is shown."""

MOST_LINES = 16
WIDEST = 100


def keys_of(folder: Path) -> list[dict[str, Any]]:
    """The keys of the steps of a folder. A comment at the top of known/keys.toml describes them."""
    keys: list[dict[str, Any]] = tomllib.loads((folder / "keys.toml").read_text("utf-8"))["step"]
    return keys


def mended(key: dict[str, Any], folder: Path) -> str:
    """The text of the step without its fault. Raises ValueError if its key does not fit."""
    text, find = (folder / key["file"]).read_text("utf-8"), key["find"].strip("\n")
    if text.count(find) != 1:
        raise ValueError(
            f"{key['file']} has the text of its key {text.count(find)} times, not once"
        )
    return text.replace(find, key["replace"].strip("\n"))


def lines_near(key: dict[str, Any], folder: Path) -> set[int]:
    """The numbers of the lines near one that is wrong."""
    faulty = {key["line"], *key.get("also", [])}
    text = (folder / key["file"]).read_text("utf-8").splitlines()
    wrong = [number for number, line in enumerate(text, 1) if line.strip() in faulty]
    return {near for number in wrong for near in range(number - NEAR, number + NEAR + 1)}


def is_shown(key: dict[str, Any], report: str, folder: Path) -> bool:
    """True if the report shows the faulty line, or one near it."""
    shown = re.findall(rf"(?m)^[> ] \S*{re.escape(key['file'])}:(\d+)  ", report)
    return not lines_near(key, folder).isdisjoint(map(int, shown))


def fits_on_a_screen(report: str) -> bool:
    """True if the report has few and short lines. How long a command is depends on the path."""
    lines = report.splitlines()
    widths = [len(line) for line in lines if not line.startswith("  Again:")]
    return len(lines) <= MOST_LINES and max(widths) <= WIDEST


def verdict_of(path: Path, trials: float = 0.0) -> Verdict:
    """The verdict on the step of a file. ``trials``: the seconds for which edits are tried."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
        with settings.using(settings.replaced(trial_seconds=trials, deadline=240.0)):
            verdict = check(module.case, module.step, **getattr(module, "options", {}))
            str(verdict)  # the report is made while the module is there
        return verdict
    finally:
        del sys.modules[path.stem]
