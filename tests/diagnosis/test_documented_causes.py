"""The table of causes in docs/diagnosis.md says what the reports say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.diagnosis.hypothesis import Hypothesis

pytestmark = pytest.mark.self_check

DOCUMENT = Path(__file__).parents[2] / "docs" / "diagnosis.md"


def test_every_cause_is_documented_in_the_words_of_its_report() -> None:
    table = DOCUMENT.read_text().partition("| cause |")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{one.name}` | {one.sentence} |" for one in HYPOTHESES]


def test_a_cause_that_the_limits_must_catch_has_a_prediction() -> None:
    """Only predictions are held against the limits; factors alone would be passed over."""
    wanted = [one for one in HYPOTHESES if one.limits_must_catch]
    assert len(wanted) > 3
    assert [one.name for one in wanted if one.held is Hypothesis.held] == []
