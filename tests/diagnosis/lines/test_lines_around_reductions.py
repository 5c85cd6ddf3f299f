"""A report about a wrong reduction shows the line beside it that made it wrong."""

from __future__ import annotations

import inspect
import sys
from functools import partial

import pytest

from ddp_equivalence import check
from ddp_equivalence.report.render import pointed_lines
from tests.diagnosis.lines import steps_around_reductions as steps
from tests.diagnosis.lines import steps_that_part as parting
from tests.diagnosis.lines.faulty_line import Step, case, rows

FOUR = case("1x4")
TEN = case("1x2", batch=partial(rows, count=10), shards="own")

NEAR = 2


def distance_to_the_fault(numbers: list[int], step: Step) -> int:
    """How many lines lie between the nearest of these lines and the one with ``# fault``."""
    module = sys.modules[step.__module__]
    source = inspect.getsource(module).splitlines()
    marked = [number for number, line in enumerate(source, start=1) if line.endswith("# fault")]
    first = inspect.getsourcelines(step)[1]
    names = step.__code__.co_names
    owners = [
        inspect.getsourcelines(one)
        for name, one in vars(module).items()
        if name in names and (inspect.isclass(one) or inspect.isfunction(one))
        if one.__module__ == step.__module__
    ]
    ranges = [(first, first + len(inspect.getsourcelines(step)[0]))]
    ranges += [(begin, begin + len(lines)) for lines, begin in owners]
    faults = [one for one in marked if any(begin <= one < end for begin, end in ranges)]
    assert len(faults) == 1, faults
    return min((abs(one - faults[0]) for one in numbers), default=1_000)


@pytest.mark.parametrize(
    ("given", "step", "note"),
    [
        (FOUR, steps.budget_is_used_up, "breaks from inside the loop of line"),
        (FOUR, steps.small_ones_are_skipped, "ends 2 passes of the loop here"),
        (FOUR, steps.context_with_a_name, "chooses whether DDP synchronises"),
        (FOUR, steps.only_the_first_three, "gives parameters, of which line"),
        (TEN, steps.order_is_cut, "order lacks examples 8, 9"),
        (FOUR, parting.waits_for_one_more, "sets wanted, which line"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_line_beside_the_reduction_is_shown(given: object, step: Step, note: str) -> None:
    verdict = check(given, step)  # type: ignore[arg-type]
    assert verdict.outcome == "different"
    report = str(verdict)
    assert len(report.splitlines()) <= 16
    shown = [one for one in pointed_lines(verdict) if f".py:{one.line.number} " in report]
    assert distance_to_the_fault([one.line.number for one in shown], step) <= NEAR, report
    assert note in "\n".join(one.note for one in shown), report
