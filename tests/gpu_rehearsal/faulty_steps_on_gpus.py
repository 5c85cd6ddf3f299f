"""Tests that ``test_faulty_steps_rehearsed.py`` runs on pretended GPUs: the faulty steps on NCCL.

Pytest collects this file only where it is named.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.faulty_steps.keys import STEPS, is_shown, verdict_of
from tests.faulty_steps.test_reports import NOT_SHOWN, steady_keys


@steady_keys
@pytest.mark.self_check
def test_the_report_says_what_it_says_on_the_cpu(
    key: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = STEPS / key["file"]
    verdict = verdict_of(path, monkeypatch)
    report = str(verdict)
    assert verdict.lane.backend == "nccl"
    assert (verdict.outcome, verdict.cause or "") == ("different", key.get("cause", "")), report
    assert is_shown(key, report) is (path.stem not in NOT_SHOWN), report
