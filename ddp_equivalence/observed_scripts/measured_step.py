"""What the ranks held at one step of a script, in the form in which ``check`` measures steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.case.training import Training
from ddp_equivalence.comparison.chunks import chunks
from ddp_equivalence.comparison.comparator import Comparator
from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.comparison.gradients import describe
from ddp_equivalence.comparison.tolerance import Tolerance
from ddp_equivalence.measurement.measure import Measurement, finished
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.work import Evidence
from ddp_equivalence.observed_scripts.as_case import Kind, ObservedStep
from ddp_equivalence.observed_scripts.rounding_of_script import ExpectedOfScript
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.rank import Rank

SECONDS_TO_EXPLAIN = 30.0
"""What explaining a difference may take."""

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Script:
    """``name``: as reports call the script. ``float64``: it was observed in float64.

    ``on_cpu``: its CUDA devices were the CPU. ``steps``: how many were recorded. ``repeat``: the
    command that observes it again. ``seconds``: what explaining a difference may take.
    """

    name: str
    backend: str
    float64: bool
    on_cpu: bool = False
    steps: int = 1
    repeat: str = ""
    seconds: float = SECONDS_TO_EXPLAIN

    @property
    def lane(self) -> Lane:
        """What the ranks ran on."""
        reason = "its CUDA devices were the CPU" if self.on_cpu else ""
        return Lane(self.backend, self.backend, "cpu", reason=reason)


def name_of_script(command: tuple[str, ...], main: str) -> str:
    """What reports call the script: the name of its file, or of the command."""
    return os.path.basename(main or command[0])


def request_of(script: Script, case: Case) -> Request:
    """What ``check`` would be asked, if the script were a step."""

    def step(model: object, shard: object, rank: Rank) -> None:
        """Stands for the script, which no rank can run as a step."""

    step.__name__ = script.name
    return Request(
        case=case,
        step=step,
        strategy=None,
        compare="gradients",
        training=Training(),
        seeds="alike",
        steps=1,
        lane=script.lane,
        deadline=script.seconds,
        collective_deadline=script.seconds,
        fresh=False,
        in_process=False,
        allow_changes=True,
        second_look=False,
        plant="",
    )


def measured(
    step: ObservedStep,
    kind: Kind,
    expected: ExpectedOfScript,
    sample: ElementSample[GradientKey],
) -> Measurement:
    """What the ranks held, compared with what is expected."""
    reference = expected.reference
    tolerance = Tolerance(reference.lowest_dtype)
    comparator = Comparator(reference.expected, expected.described, tolerance)
    evidence, sampled = {}, {}
    for rank in range(step.record.world_size):
        gradients: dict[GradientKey, Tensor | None] = {
            (0, name): one for name, one in step.gradients(rank, kind).items()
        }
        comparator.begin(rank, describe(gradients))
        for chunk in chunks(gradients):
            comparator.add(rank, chunk)
        sampled[rank] = {
            key: sample.of_one(key, gradient)
            for key, gradient in gradients.items()
            if gradient is not None and key in sample.sizes
        }
        evidence[rank] = _evidence(step, rank, gradients)
    names = {name for rank in evidence for name in step.record.step(rank, step.number).autocast}
    autocast = max(
        (AUTOCAST[name] for name in names if name in AUTOCAST),
        key=lambda dtype: torch.finfo(dtype).eps,
        default=None,
    )
    if reference.lowest_dtype is torch.float64:
        autocast = None
    return Measurement(
        comparison=finished(comparator, expected, tolerance, autocast),
        evidence=evidence,
        measured=sampled,
        output={},
        changed={},
        changes_error=None,
        outdated=False,
    )


def _evidence(
    step: ObservedStep, rank: int, gradients: Mapping[GradientKey, Tensor | None]
) -> Evidence:
    recorded = step.record.step(rank, step.number)
    return Evidence(
        examples=(step.rows_by_rank[rank],),
        data=step.digests_of_rows(rank),
        inputs=None,
        start=digest(step.weights()),
        collectives=None,
        device="cpu",
        gradients=describe(gradients),
        autocast=frozenset(("cpu", AUTOCAST[one]) for one in recorded.autocast if one in AUTOCAST),
    )


def layout_of(step: ObservedStep) -> str:
    """The layout of the ranks, as far as their environment says it."""
    world_size = step.record.world_size
    local = step.record.runs[0].get("local_world_size") or world_size
    nodes, rest = divmod(world_size, local)
    return f"{nodes}x{local}" if nodes and not rest else f"1x{world_size}"
