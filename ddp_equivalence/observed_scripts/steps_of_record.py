"""The steps of a record, and what the one process is asked of them first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ddp_equivalence.observed_scripts.as_case import ObservedStep
from ddp_equivalence.observed_scripts.oracle import MOST_BYTES, Oracle
from ddp_equivalence.observed_scripts.record import Record
from ddp_equivalence.observed_scripts.running_script import CannotReplay

BYTES_OF_ELEMENT = 24
"""An answer has up to three gradients, in float64."""


MOST_EARLIER = 200
"""One process makes as many steps as the ranks made before those that are recorded; not more than
this.
"""


def observed_steps(record: Record, oracle: Oracle | None) -> list[ObservedStep]:
    """All of them. ``oracle``: None if the one process is asked nothing."""
    steps: list[ObservedStep] = []
    for group in record.groups:
        rows, before = record.rows(group), steps[-1] if steps else None
        steps += [ObservedStep(record, oracle, number, group, rows, before) for number in group]
    return steps


def compute_in_their_order(steps: Sequence[ObservedStep], earlier: int) -> None:
    """Let the one process compute all steps, as it does by itself, before it is asked anything else
    of them: the script may count its steps, and anneal its loss by that count. ``earlier``: so many
    steps came before the first one.
    """
    if sum(step.elements for step in steps) * BYTES_OF_ELEMENT > MOST_BYTES:
        return
    with suppress(CannotReplay):  # it is asked again, and the verdict then says why
        if steps and steps[0].oracle is not None and earlier <= MOST_EARLIER:
            steps[0].oracle.warm_up(steps[0].group, steps[0].rows, earlier)
            steps[0].oracle.keeps = True
        for step in steps:
            step.answer(step.everything)
