"""Backward methods of the user's own that return the same whatever gradient they are given."""

from __future__ import annotations

from dataclasses import replace

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, first_of_each_line
from ddp_equivalence.measurement.one_rank import OneRank
from ddp_equivalence.measurement.operations import DeafBackward

MOST_INPUTS = 3


def deaf_methods(runs: OneRank, *, is_right_alone: bool) -> tuple[DeafBackward, ...]:
    """Those of the run on one rank; where this is right, only those that more ranks add."""
    if not is_right_alone:
        return runs.alone.deaf
    found = dict.fromkeys(one for run in runs.by_rank.values() for one in run.deaf)
    return tuple(one for one in found if one not in runs.alone.deaf)


def with_deaf_methods(
    found: Whereabouts, deaf: tuple[DeafBackward, ...], view: View
) -> Whereabouts:
    """What was found already, with the lines at which these methods returned."""
    by_name = {one.name: one for one in deaf}
    lines: dict[str, PointedLine] = {}
    for seen in view.observed.by_rank.values():
        for own in seen.own_backwards:
            if own.name in by_name and own.step == view.setting.step:
                note = (
                    f"the gradient of {_inputs(by_name[own.name])} is not made from the one given"
                )
                lines.setdefault(own.name, PointedLine(own.line, note, is_fault=True))
    if not lines:
        return found
    name = next(iter(lines))
    return replace(
        found,
        kind="own gradient",
        headline="a backward method ignores the gradient it is given",
        sentence=f"{name}.backward did not compute the gradient of {_inputs(by_name[name])} from "
        f"the one that it was given, which is not 1. {found.sentence}",
        lines=first_of_each_line(
            [*lines.values(), *(replace(one, is_fault=False) for one in found.lines)]
        ),
        fix="",
    )


def _inputs(one: DeafBackward) -> str:
    numbers = [str(number) for number in one.inputs[:MOST_INPUTS]]
    if len(one.inputs) > MOST_INPUTS:
        return f"inputs {', '.join(numbers)}, ..."
    if len(numbers) == 1:
        return f"input {numbers[0]}"
    return f"inputs {', '.join(numbers[:-1])} and {numbers[-1]}"
