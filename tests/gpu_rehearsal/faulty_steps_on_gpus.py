"""Tests that ``test_rehearsed.py`` runs on pretended GPUs: the faulty steps on NCCL.

Pytest collects this file only where it is named.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.steps.keys import KNOWN, is_shown, keys_of, verdict_of

OF_EACH_KIND = (
    "s04_",  # a gradient is changed after a collective that gives no handle
    "s15_",  # a hook, which runs on the thread of the device
    "s100_",  # a backward method of the user's own, which runs there as well
    "s88_",  # an operation is recorded on ranks whose collectives give no handle
    "s127_",  # an operation is recorded that no other than one rank has
)


@pytest.mark.self_check
@pytest.mark.parametrize(
    "key", [key for key in keys_of(KNOWN) if key["file"].startswith(OF_EACH_KIND)]
)
def test_the_report_says_what_it_says_on_the_cpu(key: dict[str, Any]) -> None:
    verdict = verdict_of(KNOWN / key["file"])
    report = str(verdict)
    assert verdict.lane.backend == "nccl"
    assert (verdict.outcome, verdict.cause or "") == ("different", key.get("cause", "")), report
    assert is_shown(key, report, KNOWN), report
