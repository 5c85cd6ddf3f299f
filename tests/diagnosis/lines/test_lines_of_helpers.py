"""Where helpers are called, hooks that return nothing, and what computed the ranks of a group."""

from __future__ import annotations

import linecache
from typing import Any

import pytest

from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.report.render import pointed_lines
from ddp_equivalence.report.verdict import Verdict
from tests.diagnosis.lines import steps_with_helpers as steps
from tests.package.pointed_at import MARK, judged

pytestmark = pytest.mark.self_check


def shown(verdict: Verdict) -> str:
    """The lines of the report with what it says of them."""
    return "\n".join(f"{_text(one)}  {one.note}" for one in pointed_lines(verdict))


def _text(pointed: PointedLine) -> str:
    return linecache.getline(pointed.line.file, pointed.line.number).strip()


def note_of_the_fault(verdict: Verdict) -> str:
    """What the report says of the marked line, which it must show and call the fault."""
    assert verdict.outcome == "different", verdict
    found = [one for one in pointed_lines(verdict) if MARK in _text(one)]
    assert [one.is_fault for one in found] == [True], verdict
    return found[0].note


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (steps.summed_by_a_method, "reduced_more_than_once"),
        (steps.cleared_by_a_helper, "only_last_micro_batch"),
    ],
)
def test_the_call_of_the_helper_in_the_loop_is_shown(step: Any, cause: str) -> None:
    verdict = judged(step)
    assert verdict.cause == cause, verdict
    assert "leads to line" in note_of_the_fault(verdict)


@pytest.mark.parametrize("step", [steps.rows_of_a_mask, steps.copies_from_a_function])
def test_a_copy_that_a_helper_reduces_and_nobody_puts_back_is_shown_where_it_is_given(
    step: Any,
) -> None:
    verdict = judged(step)
    assert verdict.cause == "reduced_buffer_not_used", verdict
    note_of_the_fault(verdict)


@pytest.mark.parametrize(
    ("step", "note"),
    [
        (steps.computed_by_a_late_hook, "computes mean and does not write it to .grad"),
        (steps.divided_out_of_place, "computes this and drops it"),
    ],
)
def test_what_is_computed_of_a_gradient_and_dropped_is_shown(step: Any, note: str) -> None:
    verdict = judged(step)
    assert verdict.cause == "sum_not_mean", verdict
    assert note in note_of_the_fault(verdict)


@pytest.mark.parametrize("step", [steps.watched_by_a_hook, steps.changed_in_place])
def test_a_hook_whose_result_is_used_is_not_said_to_drop_it(step: Any) -> None:
    verdict = judged(step)
    assert verdict.outcome == "different", verdict
    assert "returns nothing" not in shown(verdict), verdict
    assert "drops" not in shown(verdict)


def test_the_call_of_a_helper_that_divides_once_more_is_shown() -> None:
    verdict = judged(steps.divided_once_more_by_a_helper)
    assert verdict.cause == "averaged_twice", verdict
    assert "divide_all(model)  # the call  runs once, and leads to line" in shown(verdict)


def test_a_clear_of_some_gradients_only_is_shown() -> None:
    verdict = judged(steps.cleared_where_large)
    assert verdict.cause == "stale_gradient_added", verdict
    assert "true 3 of 6 times" in note_of_the_fault(verdict)
    assert "missing" not in str(verdict)


def test_the_line_that_computes_the_ranks_of_a_group_is_shown() -> None:
    verdict = judged(steps.in_computed_groups)
    assert verdict.cause == "reduced_in_wrong_group", verdict
    assert note_of_the_fault(verdict) == "makes groups {0, 1} and {2, 3}"
