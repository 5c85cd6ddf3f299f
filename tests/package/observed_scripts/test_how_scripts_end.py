"""Scripts that hang, fail or end before they have made all steps that were asked for."""

from __future__ import annotations

import re

import pytest

from ddp_equivalence import NotEquivalent, NothingCompared
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.observed_scripts.ending import Ending, RankPlace, ScriptFailed
from ddp_equivalence.observed_scripts.report import as_json
from tests.package.observed_scripts.observing import (
    observed,
    source_of_fault,
    started_until,
)

SCRIPT = "ends_early.py"
IN_A, IN_B = (RankPlace(CodeLine("train.py", n, "train"), "all_reduce") for n in (1, 2))
ELSEWHERE, GONE = RankPlace(CodeLine("train.py", 3, "train")), RankPlace(has_ended=True)


def test_a_hang_of_ranks_that_wait_for_each_other_is_a_fault_and_says_where_they_wait() -> None:
    found = observed(SCRIPT, "stops", steps=5, deadline=2, start=started_until("the_end_is_near"))
    assert [one.outcome for one in found.verdicts] == ["same"]
    assert (found.outcome, found.cause) == ("different", "ranks_wait_for_each_other")
    for report in (str(found), found.full_report()):
        text = " ".join(report.split())
        assert "was ended after 2 s, after 1 of the 5 steps that were asked for" in text
        assert re.search(
            r"rank 0 waits in .{1,30} at ends_early.py:\d+; rank 1 waits in barr", text
        )
        assert "Steps: 1 same" in text
    assert source_of_fault(found) == "dist.barrier()"
    assert (as_json(found)["outcome"], as_json(found)["ending"]) == ("different", "different")
    with pytest.raises(NotEquivalent):
        found.assert_equivalent()


def test_a_crash_is_unknown_with_the_steps_before_it_and_its_error() -> None:
    found = observed(SCRIPT, "raises", steps=5)
    assert (found.outcome, [one.outcome for one in found.verdicts]) == ("unknown", ["same"])
    assert found.verdict.unknown_because is UnknownBecause.RANK_FAILED
    assert "failed after 1 of the 5 steps" in found.verdict.reason
    assert found.verdict.reason.endswith("RuntimeError: rank 1 has no room left")
    assert "Steps: 1 same" in str(found)
    assert as_json(found)["ending"] == "unknown"
    with pytest.raises(NothingCompared):
        found.assert_equivalent()


def test_a_crash_after_a_step_that_differs_is_told_beside_it() -> None:
    found = observed(SCRIPT, "raises", "times", steps=5)
    assert (found.outcome, found.cause) == ("different", "sum_not_mean")
    assert "rank 1 has no room left" in str(found)


def test_a_rank_that_does_something_else_at_the_deadline_may_come_yet() -> None:
    found = observed(
        SCRIPT,
        "sleeps",
        steps=5,
        precision="own",
        deadline=2,
        start=started_until("the_end_is_near"),
    )
    assert (found.outcome, [one.outcome for one in found.verdicts]) == ("unknown", ["same"])
    assert found.verdict.unknown_because is UnknownBecause.RANKS_TIMED_OUT
    assert re.search(r"rank 1 is at ends_early.py:\d+$", found.verdict.reason)


def test_a_hang_before_the_first_step_says_where_the_ranks_wait() -> None:
    where = r"asked for; rank 0 waits in [a-zA-Z' ]+ at ends_early.py:\d+\. It printed"
    with pytest.raises(ScriptFailed, match=where):
        observed(
            SCRIPT,
            "hangs_at_once",
            steps=5,
            precision="own",
            deadline=2,
            start=started_until("the_end_is_near"),
        )


def test_a_script_may_end_after_fewer_steps_on_all_ranks_and_says_so() -> None:
    found = observed(SCRIPT, "all_stop", steps=5)
    assert (found.outcome, len(found.verdicts), found.ending) == ("same", 2, None)
    note = "the script ended by itself after 2 of the 5 steps that were asked for"
    assert note in found.notes
    assert observed(SCRIPT, "all_stop", steps=2).notes == ()


@pytest.mark.parametrize(
    ("ranks", "outcome"),
    [
        pytest.param([IN_A, IN_B], "different", id="they wait in two collectives"),
        pytest.param([IN_A, GONE], "different", id="one has ended"),
        pytest.param([IN_A, IN_A], "unknown", id="they wait together"),
        pytest.param([IN_A, IN_B, ELSEWHERE], "unknown", id="one may come yet"),
        pytest.param([ELSEWHERE, ELSEWHERE], "unknown", id="they train"),
    ],
)
def test_what_a_hang_shows(ranks: list[RankPlace], outcome: str) -> None:
    made = [1] * len(ranks)
    assert Ending(None, 9.0, 5, made, "", dict(enumerate(ranks))).outcome == outcome


def test_ranks_that_end_after_different_numbers_of_steps_have_not_shown_the_same() -> None:
    ended = Ending(0, 9.0, 5, [3, 2], "")
    assert ended.outcome == "unknown"
    assert "2 of the 5 steps" in str(ended)
    assert "(3 on rank 0, 2 on rank 1)" in str(ended)
