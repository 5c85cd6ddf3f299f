"""Every faulty step is called different, and the one change of its key makes it right."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ddp_equivalence import check

HERE = Path(__file__).resolve().parent
STEPS = HERE / "steps"
KEYS: list[dict[str, Any]] = tomllib.loads((HERE / "keys.toml").read_text("utf-8"))["step"]

every_key = pytest.mark.parametrize("key", KEYS, ids=[Path(key["file"]).stem for key in KEYS])


def test_every_step_has_a_key() -> None:
    assert [key["file"] for key in KEYS] == sorted(path.name for path in STEPS.glob("*.py"))


@every_key
def test_the_key_points_to_one_place(key: dict[str, Any]) -> None:
    text = (STEPS / key["file"]).read_text("utf-8")
    lines = [line.strip() for line in text.splitlines()]
    assert text.count(key["find"]) == 1
    for line in [key["line"], *key.get("also", [])]:
        assert lines.count(line) == 1, line


@every_key
@pytest.mark.self_check
def test_the_faulty_step_is_different(key: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome_of(STEPS / key["file"], monkeypatch) == "different"


@every_key
@pytest.mark.self_check
def test_the_repaired_step_is_the_same(
    key: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repaired = tmp_path / f"repaired_{key['file']}"
    text = (STEPS / key["file"]).read_text("utf-8")
    repaired.write_text(text.replace(key["find"], key["replace"]), "utf-8")
    assert outcome_of(repaired, monkeypatch) == "same"


def outcome_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    module = loaded(path, monkeypatch)
    return check(module.case, module.step).outcome


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module
