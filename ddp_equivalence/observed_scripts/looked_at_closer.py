"""Runs the ranks once more, and watches line by line the step that was wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch

from ddp_equivalence.measurement.calls import Operations
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.observed_scripts.analysis_of_script import AnalysisOfScript
from ddp_equivalence.observed_scripts.as_case import ObservedStep
from ddp_equivalence.observed_scripts.in_script.closer_look import FILE
from ddp_equivalence.observed_scripts.record import Record
from ddp_equivalence.observed_scripts.recorded_step import BEFORE_CLIP, rank_folder, read_whole
from ddp_equivalence.observed_scripts.recording import ScriptFailed
from ddp_equivalence.observed_scripts.told import LookAt
from ddp_equivalence.report.verdict import Verdict

RunAgain = Callable[[LookAt, int], Record | None]
"""Runs the ranks again, and records the step with this number alone, with a closer look at it; None
if they do not repeat what they did. Raises ScriptFailed if they do not get so far.
"""

MOST_ELEMENTS = 20_000_000
"""Of weights and buffers. What is logged of operations holds all of their results in memory."""

ROUNDING = 1e-5
"""The relative difference of weights that may be rounding: about a hundred eps of float32, after a
few steps. Weights with other seeds differ by much more.
"""


@dataclass(frozen=True)
class SecondRun:
    """``observations``: rank -> what was seen of it. ``operations``: rank -> those that it ran.
    ``module``: the name of the one that was watched. All are empty if the step cannot be watched,
    or was not reached again; there are no operations of a large module.
    """

    observations: Mapping[int, Observation] = field(default_factory=dict)
    operations: Mapping[int, Operations] = field(default_factory=dict)
    module: str = ""


def second_run(step: ObservedStep, verdict: Verdict, run_again: RunAgain) -> SecondRun:
    """Watch the step, if the parameters of one module alone are compared.

    Raises ScriptFailed if the script fails where it is watched, also if less is watched.
    """
    modules = {name.partition(":")[0] for name in step.of_rank(0).stepped}
    if not isinstance(verdict.analysis, AnalysisOfScript):
        return SecondRun()
    if len(modules) != 1 or len(step.group) != 1:
        return SecondRun()
    sample = verdict.analysis.sample_of_step(0)
    recorded = step.of_rank(0)
    before_clip = recorded.clips and verdict.analysis.kind == BEFORE_CLIP
    clipped_after = len(recorded.losses) if before_clip else 0
    module, small = modules.pop(), step.elements <= MOST_ELEMENTS
    look_at = LookAt(module, sample, _rows(step), clipped_after, operations=small)
    try:
        record = run_again(look_at, step.number)
    except ScriptFailed:
        record = run_again(replace(look_at, operations=False, set_up=False), step.number)
    if record is None:
        return SecondRun()
    observations, operations = dict[int, Observation](), dict[int, Operations]()
    for rank in step.ranks:
        folder = rank_folder(record.folder, rank)
        if not (folder / FILE).exists():
            return SecondRun()
        observations[rank], of_rank = read_whole(folder / FILE)
        if of_rank is not None:
            operations[rank] = of_rank
    return SecondRun(observations, operations, module)


def is_the_same(step: ObservedStep, again: Record) -> bool:
    """True if the ranks read the same rows again, and began with the same weights but for rounding.

    ``again``: holds that step alone. Devices may round otherwise in the steps before it.
    """
    (number, *_) = again.steps
    if any(step.of_rank(rank).read != again.step(rank, number).read for rank in step.ranks):
        return False
    before, after = step.of_rank(0).states, again.step(0, number).states
    return before.keys() == after.keys() and all(
        torch.allclose(one.double(), after[name].double(), rtol=ROUNDING, atol=0.0, equal_nan=True)
        for name, one in before.items()
    )


def _rows(step: ObservedStep) -> list[list[tuple[int, int]]]:
    """For each rank, the number of the first row of every micro-batch, and how many it has."""
    found: list[list[tuple[int, int]]] = []
    for rows in step.rows_by_rank:
        units = (list(of) for _, of in groupby(rows, key=lambda n: step.rows[n].micro_batch))
        found.append([(unit[0], len(unit)) for unit in units])
    return found
