"""Tests that ``test_faulty_steps_rehearsed.py`` runs on pretended GPUs: the faulty steps on NCCL.

Pytest collects this file only where it is named.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.faulty_steps.keys import STEPS, is_shown, lines_shown, verdict_of
from tests.faulty_steps.test_reports import REPORTS, steady_keys


@steady_keys
@pytest.mark.self_check
def test_the_report_says_what_it_says_on_the_cpu(
    key: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = STEPS / key["file"]
    verdict = verdict_of(path, monkeypatch)
    report, on_cpu = str(verdict), (REPORTS / f"{path.stem}.txt").read_text("utf-8")
    assert verdict.lane.backend == "nccl"
    assert report.splitlines()[0] == on_cpu.splitlines()[0], report
    assert is_shown(key, report) is is_shown(key, on_cpu), report
    assert lines_shown(path.name, report)[:1] == lines_shown(path.name, on_cpu)[:1], report
