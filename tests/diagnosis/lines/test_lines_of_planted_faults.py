"""A fault is planted in a step of one's own: the report points at the line at which it acts."""

from __future__ import annotations

import pytest

from ddp_equivalence.commands.own_steps import lines_right, points_at
from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.faults import FAULTS
from tests.package.pointed_at import judged, mean_loss

pytestmark = pytest.mark.self_check

WITH_LINES = [name for name, fault in FAULTS.items() if fault.own_step]


@pytest.mark.parametrize("name", WITH_LINES)
def test_the_line_at_which_a_planted_fault_acts_is_pointed_at(name: str) -> None:
    assert lines_right([name]) == {name: True}


def test_a_fault_whose_damage_is_in_no_line_of_ones_own_is_left_out() -> None:
    assert lines_right(["clipped_before_reduce"]) == {}


def test_a_line_with_another_mark_is_not_right() -> None:
    verdict = judged(unreduced)
    assert verdict.cause == "no_all_reduce", verdict
    assert points_at(verdict, "no_all_reduce", ("backward",))
    assert not points_at(verdict, "no_all_reduce", ("wrap",))
    assert not points_at(verdict, "rank_left_out", ("backward",))


def unreduced(model, rows, rank):  # type: ignore[no-untyped-def]
    mean_loss(model, rows).backward()  # backward


@pytest.mark.parametrize("hypothesis", HYPOTHESES, ids=lambda one: one.name)
def test_a_headline_has_at_most_seven_words_in_lower_case(hypothesis) -> None:  # type: ignore[no-untyped-def]
    headline = hypothesis.headline
    assert len(headline.split()) <= 7
    assert headline[:1] == headline[:1].lower()
    assert not headline.endswith(".")
