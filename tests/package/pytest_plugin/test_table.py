"""The rows of the closing table and the colours that they are printed in."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_equivalence.pytest_plugin.results import NotRun, RunResults, summary_lines
from ddp_equivalence.report.record import Record
from ddp_equivalence.report.text import Style


def record(**changes: Any) -> Record:
    fields: dict[str, Any] = {
        **{"id": "test_it", "strategy": "step", "layout": "1x2", "backend": "gloo"},
        **{"dtype": "float64", "expected": "same", "outcome": "same", "cause": None, "causes": ()},
        **{"error": 0.0, "floor": None, "limit": 1e-14, "seconds": 0.1, "reason": ""},
        "unknown_because": None,
        **{"lane_reason": "", "parameters": 4, "elements": 20, "ranks": 2},
    }
    return Record(**(fields | changes))


def styles(results: RunResults, must_run: tuple[str, ...] = ()) -> dict[str, Style]:
    return {line.text: line.style for line in summary_lines(results, must_run)}


def test_a_run_in_which_everything_is_the_same_has_no_colour() -> None:
    table = styles(RunResults([record(), record(layout="2x2")]))
    assert set(table.values()) == {Style.PLAIN}
    assert list(table) == [
        "                                  1x2   2x2",
        "step                                1     1    same",
        "lane gloo: 2 cases compared",
        "2 cases compared with one big batch: 16 gradients of parameters, on 4 ranks",
    ]


@pytest.mark.parametrize(
    ("outcome", "state"), [("different", "1 same, 1 DIFFER"), ("unknown", "1 same, 1 UNKNOWN")]
)
def test_a_row_that_is_not_the_same_is_bad(outcome: str, state: str) -> None:
    table = styles(RunResults([record(), record(outcome=outcome)]))
    (row,) = (text for text in table if text.startswith("step"))
    assert row.endswith(state)
    assert table[row] is Style.BAD


def test_words_in_a_name_or_a_reason_choose_no_colour() -> None:
    lane_reason = "FAILED and NOT RUN"
    table = styles(RunResults([record(strategy="UNKNOWN_step", lane_reason=lane_reason)]))
    assert set(table.values()) == {Style.PLAIN}


def test_a_trial_that_did_not_run_is_uncertain_and_a_lane_that_had_to_run_is_bad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ddp_equivalence.ranks.lanes.cuda_devices", lambda: ("0",))
    not_run = NotRun("data_parallel", "1x2", "data_parallel", "needs 2 CUDA devices, found 0")
    table = styles(RunResults([record()], [not_run]), must_run=("data_parallel",))
    (row,) = (text for text in table if "NOT RUN: needs 2 CUDA devices" in text)
    assert table[row] is Style.UNCERTAIN
    missing = "--must-run data_parallel: FAILED, nothing was compared on this lane"
    assert table[f"{missing}, which needs 2 CUDA devices, found 1"] is Style.BAD


def test_a_fault_that_only_the_bits_of_the_ranks_show_is_near_no_limit() -> None:
    caught = {"outcome": "different", "expected": "different", "limit": 1e-3}
    far = record(planted="sum_not_mean", causes=("sum_not_mean",), error=1.0, **caught)
    bits = record(
        planted="ranks_differ_by_rounding",
        causes=("ranks_differ_by_rounding",),
        error=1e-9,
        **caught,
    )
    (row,) = (text for text in styles(RunResults([far, bits])) if text.startswith("planted"))
    assert row.endswith("2 of 2 caught, 2 of 2 named (2 kinds), nearest 1e+03 limits away")


def test_steps_that_cannot_run_for_one_reason_are_listed_together() -> None:
    needs = "needs 4 CUDA devices, found 2"
    not_run = [NotRun(name, "2x2", "nccl", needs) for name in ("a", "b", "c", "d")]
    table = list(styles(RunResults([record()], not_run)))
    at = table.index(f"NOT RUN: {needs}:")
    assert table[at + 1] == "  a, b, c, d"
    few = list(styles(RunResults([record()], not_run[:3])))
    assert [row.split()[0] for row in few if row.endswith(needs)] == ["a", "b", "c"]


def test_a_run_that_compares_nothing_is_bad() -> None:
    table = styles(RunResults())
    assert table == {"NOTHING was compared with one big batch": Style.BAD}
