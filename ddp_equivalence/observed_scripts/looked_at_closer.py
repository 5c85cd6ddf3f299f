"""Runs the ranks once more, and watches line by line the step that was wrong."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

from ddp_equivalence.measurement.calls import Operations
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.observed_scripts.analysis_of_script import AnalysisOfScript
from ddp_equivalence.observed_scripts.as_case import BEFORE_CLIP, ObservedStep
from ddp_equivalence.observed_scripts.in_script.closer_look import FILE, OPERATIONS
from ddp_equivalence.observed_scripts.record import Record
from ddp_equivalence.observed_scripts.recorded_step import rank_folder
from ddp_equivalence.observed_scripts.recording import ScriptFailed
from ddp_equivalence.observed_scripts.told import LookAt
from ddp_equivalence.report.verdict import Verdict

Seen = TypeVar("Seen", Observation, Operations)

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
    held = step.record.reader(0, step.number).gradient_names("held/")
    modules = {name.partition(":")[0] for name in held}
    if not isinstance(verdict.analysis, AnalysisOfScript):
        return SecondRun()
    if len(modules) != 1 or len(step.group) != 1:
        return SecondRun()
    sample = verdict.analysis.sample_of_step(0)
    recorded = step.record.step(0, step.number)
    before_clip = recorded.clips and verdict.analysis.kind == BEFORE_CLIP
    clipped_after = len(recorded.losses) if before_clip else 0
    sizes, stride = dict(sample.sizes), dict(sample.stride)
    module, small = modules.pop(), step.elements <= MOST_ELEMENTS
    look_at = LookAt(module, sizes, stride, _rows(step), clipped_after, operations=small)
    try:
        record = run_again(look_at, step.number)
    except ScriptFailed:
        record = run_again(replace(look_at, operations=False, set_up=False), step.number)
    if record is None:
        return SecondRun()
    observations, operations = {}, {}
    for rank in range(step.record.world_size):
        folder = rank_folder(record.folder, rank)
        if not (folder / FILE).exists():
            return SecondRun()
        observations[rank] = _read(folder / FILE, Observation)
        if (folder / OPERATIONS).exists():
            operations[rank] = read_operations(folder / OPERATIONS)
    return SecondRun(observations, operations, module)


def read_operations(path: Path) -> Operations:
    """What ``LoggedOperations`` wrote, a moment ago."""
    return _read(path, Operations)


def is_the_same(step: ObservedStep, again: Record) -> bool:
    """True if the ranks read the same rows again, and began with the same weights but for rounding.

    ``again``: holds that step alone. Devices may round otherwise in the steps before it.
    """
    ranks, (number, *_) = range(step.record.world_size), again.steps
    if any(step.record.step(r, step.number).read != again.step(r, number).read for r in ranks):
        return False
    before = step.record.reader(0, step.number).below("weights/")
    after = again.reader(0, number).below("weights/")
    return before.keys() == after.keys() and all(
        torch.allclose(one.double(), after[name].double(), rtol=ROUNDING, atol=0.0, equal_nan=True)
        for name, one in before.items()
    )


def _read(path: Path, kind: type[Seen]) -> Seen:
    found = pickle.loads(path.read_bytes())  # written by a process of ours, a moment ago
    assert isinstance(found, kind)
    return found


def _rows(step: ObservedStep) -> list[list[tuple[int, int]]]:
    """For each rank, the number of the first row of every micro-batch, and how many it has."""
    rows: list[list[tuple[int, int]]] = []
    for rank in range(step.record.world_size):
        of_rank: list[tuple[int, int]] = []
        last = -1
        for number, row in enumerate(step.rows):
            if row.rank != rank:
                continue
            if row.micro_batch != last:
                of_rank.append((number, 0))
                last = row.micro_batch
            first, count = of_rank[-1]
            of_rank[-1] = first, count + 1
        rows.append(of_rank)
    return rows
