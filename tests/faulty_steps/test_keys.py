"""The key of a faulty step points to one place, and the change that it gives makes it right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faulty_steps.keys import KEYS, STEPS, every_key, verdict_of


def test_every_step_has_a_key() -> None:
    files = sorted((path.name for path in STEPS.glob("*.py")), key=_number)
    assert [key["file"] for key in KEYS] == files


def _number(file: str) -> int:
    return int(file.partition("_")[0].removeprefix("s"))


@every_key
def test_the_key_points_to_one_place(key: dict[str, Any]) -> None:
    text = (STEPS / key["file"]).read_text("utf-8")
    lines = [line.strip() for line in text.splitlines()]
    assert text.count(key["find"]) == 1
    for line in [key["line"], *key.get("also", [])]:
        assert lines.count(line) == 1, line


@every_key
@pytest.mark.self_check
def test_the_repaired_step_is_the_same(
    key: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repaired = tmp_path / f"repaired_{key['file']}"
    text = (STEPS / key["file"]).read_text("utf-8")
    repaired.write_text(text.replace(key["find"], key["replace"]), "utf-8")
    verdict = verdict_of(repaired, monkeypatch)
    assert verdict.outcome == "same", str(verdict)
