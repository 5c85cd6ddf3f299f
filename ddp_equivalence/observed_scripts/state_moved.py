"""Compares the buffers that the ranks leave with those of one process that has all rows.

From the buffers that the ranks had, one process may compute the same gradients in every step, while
each rank moves a codebook or a centre by its own rows. So the next step is computed once more, from
the buffers that the one process has left itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.buffers_beside import BufferBeside, error_of
from ddp_equivalence.diagnosis.state_that_matters import finding_of_state
from ddp_equivalence.observed_scripts.as_case import ObservedStep
from ddp_equivalence.observed_scripts.differences_between_ranks import OF_BATCH_NORM, lines_at
from ddp_equivalence.observed_scripts.query import State
from ddp_equivalence.observed_scripts.running_script import CannotReplay
from ddp_equivalence.report.verdict import Verdict


def with_state_of_one_process(
    step: ObservedStep, verdict: Verdict, compared: Callable[[ObservedStep], Verdict]
) -> Verdict:
    """The verdict on a step that is the same; or "different", if it is not the same from the
    buffers that one process leaves after the step before. ``compared``: gives a verdict on a step.
    """
    try:
        moved, state = _moved_otherwise(step)
        beside = compared(replace(step, state=state)) if moved else verdict
    except CannotReplay:
        return verdict
    if beside.outcome != "different":
        return verdict
    buffers = step.record.step(0, step.number).earlier.buffers
    place = next((buffers[one.name] for one in moved if one.name in buffers), None)
    note = f"changes {step.short(moved[0].name)} by the rows of each rank alone"
    finding = replace(
        finding_of_state([replace(one, name=step.short(one.name)) for one in moved], {}, {}),
        unexplained=0.0,
        lines=() if place is None else lines_at(place, note),
    )
    return replace(beside, cause=finding.cause, findings=(finding,))


def _moved_otherwise(step: ObservedStep) -> tuple[list[BufferBeside], State]:
    """The buffers that step before has left otherwise on rank 0 than in one process, and which
    nothing has changed since; and where those of the one process are. Raises CannotReplay.
    """
    before = step.before
    if before is None or step.number != step.group[0]:
        return [], State()
    left = before.record.reader(0, before.number).below("left/")
    now = step.record.reader(0, step.number)
    left = {
        name: one
        for name, one in left.items()
        if not name.endswith(OF_BATCH_NORM) and _equal(now.tensor(f"weights/{name}"), one)
    }
    if not left:
        return [], State()
    answer = before.answer(before.everything)
    right = answer.state_left()
    errors = {name: error_of(one, right[name]) for name, one in left.items() if name in right}
    moved = [BufferBeside(name, error, (0,)) for name, error in errors.items() if error]
    return moved, State(answer.file, tuple(one.name for one in moved))


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one, other)
