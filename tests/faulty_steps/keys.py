"""The faulty steps and their keys: what is wrong with each, where, and what makes it right."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence import check
from ddp_equivalence.report.verdict import Verdict

HERE = Path(__file__).resolve().parent
STEPS = HERE / "steps"
KEYS: list[dict[str, Any]] = tomllib.loads((HERE / "keys.toml").read_text("utf-8"))["step"]

every_key = pytest.mark.parametrize("key", KEYS, ids=[Path(key["file"]).stem for key in KEYS])


def verdict_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """The verdict on the step of a file, which stays imported until the test ends."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return check(module.case, module.step)
