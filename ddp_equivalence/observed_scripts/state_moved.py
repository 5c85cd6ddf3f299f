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
    buffers that one process has after the step before. ``compared``: gives a verdict on a step.
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
    note = f"changes {step.short(moved[0].name)}, and not as one process with all rows does"
    finding = replace(
        finding_of_state([replace(one, name=step.short(one.name)) for one in moved], {}, {}),
        unexplained=0.0,
        lines=() if place is None else lines_at(place, note),
    )
    return replace(beside, cause=finding.cause, findings=(finding,))


def _moved_otherwise(step: ObservedStep) -> tuple[list[BufferBeside], State]:
    """The buffers that rank 0 had otherwise at the beginning of the step than one process, which
    computes the step before with all rows; and where those of the one process are. None are known
    if it leaves others when it is asked twice: a counter may decide. Raises CannotReplay.
    """
    before, oracle = step.before, step.oracle
    if before is None or oracle is None or step.number != step.group[0]:
        return [], State()
    now, earlier = (one.record.reader(0, one.number) for one in (step, before))
    weights = {*now.gradient_names("held/"), *now.step.without_gradient}
    changed = {
        name: value
        for name, value in now.below("weights/").items()
        if name not in weights and not name.endswith(OF_BATCH_NORM)
        if not _equal(earlier.tensor(f"weights/{name}"), value)
    }
    if not changed:
        return [], State()
    asked = before.group, before.rows, step.group, step.rows
    answer, again = (oracle.buffers_carried_over(*asked).steps[0] for _ in range(2))
    right, repeated = answer.state_left(), again.state_left()
    moved = [
        BufferBeside(name, error, (0,))
        for name, value in changed.items()
        if name in right and _equal(repeated.get(name), right[name])
        if (error := error_of(value, right[name]))
    ]
    return moved, State(answer.file, tuple(one.name for one in moved))


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one, other)
