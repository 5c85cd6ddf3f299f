"""A step of an observed script: its case for ``check``, whose loss asks the script, and how the
ranks make it once more.

So the comparison and the diagnosis of ``check`` need to know nothing of scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.case import Case
from ddp_equivalence.comparison.gradients import ElementSample, digest
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE
from ddp_equivalence.measurement.calls import Operations
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.observed_scripts.in_script.closer_look import FILE
from ddp_equivalence.observed_scripts.oracle import CannotReplay, Oracle
from ddp_equivalence.observed_scripts.queries import OF_RECORD, LookAt, State
from ddp_equivalence.observed_scripts.record import (
    BEFORE_CLIP,
    GradientKind,
    Record,
    Row,
    Step,
    rank_folder,
    read_whole,
)
from ddp_equivalence.observed_scripts.rows import Part, joined
from ddp_equivalence.ranks.lanes import Lane

MOST_LABELS = 1 << 20
"""Tensors with more elements than this are not looked at as labels."""

ROWS = "rows of the step"
"""The leaf of the batch: the numbers of the rows in an observed step. No label has spaces in its
name.
"""

Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Script:
    """``name``: as reports call the script. ``float64``: it was observed in float64.

    ``on_cpu``: its CUDA devices were the CPU. ``steps``: how many were recorded. ``repeat``: the
    command that observes it again. ``seconds``: what explaining a difference may take. ``plant``:
    the name of the fault that is planted in its ranks.
    """

    name: str
    backend: str
    float64: bool
    on_cpu: bool
    steps: int
    repeat: str
    seconds: float
    plant: str

    @property
    def lane(self) -> Lane:
        """The lane on which the ranks ran."""
        reason = "its CUDA devices were the CPU" if self.on_cpu else ""
        return Lane(self.backend, self.backend, "cpu", reason=reason)


@dataclass(frozen=True)
class ScriptStep:
    """One step of a script. ``number``: of the step. ``group``: the steps that are computed
    together, see ``Record.groups``. ``rows``: all rows that the ranks read, in their order.
    ``before``: the step before the group; None if it is not known. ``state``: as in ``Query``.
    """

    script: Script
    record: Record
    oracle: Oracle | None
    number: int
    group: tuple[int, ...]
    rows: tuple[Row, ...]
    before: ScriptStep | None = None
    state: State = OF_RECORD

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.record.world_size)

    @property
    def recorded(self) -> list[Step]:
        """The record of each rank in the step."""
        return [self.record.step(rank, self.number) for rank in self.ranks]

    @property
    def elements(self) -> int:
        """The number of elements of the weights and buffers."""
        return sum(one.numel() for one in self.recorded[0].states.values())

    @property
    def ends_epoch_early(self) -> bool:
        """The step has fewer micro-batches than others, as the last one of an epoch."""
        return self.record.is_cut_short(self.group)

    @property
    def draws(self) -> bool:
        """A rank has drawn random numbers in the step."""
        return any(one.draws for one in self.recorded)

    # --- what one process computes

    def answer(self, rows: Sequence[int], nudge: int = 0) -> Step:
        """Let the script compute these rows alone. ``nudge``: as in ``Query``.

        Raises CannotReplay.
        """
        if self.oracle is None:
            raise CannotReplay("the script does not run any more")
        answer = self.oracle.answer(self.group, [self.rows[row] for row in rows], nudge, self.state)
        return answer.steps[self.group.index(self.number)]

    def alone(self, rank: int) -> Step:
        """Let the script compute the rows of one rank alone. Raises CannotReplay."""
        return self.answer(self.rows_by_rank[rank])

    @property
    def everything(self) -> tuple[int, ...]:
        """The numbers of all rows."""
        return tuple(range(len(self.rows)))

    @property
    def rows_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the rows that each rank read."""
        numbered = list(enumerate(self.rows))
        return tuple(
            tuple(number for number, row in numbered if row.rank == rank) for rank in self.ranks
        )

    # --- gradients and weights, by the names that reports use

    def short(self, name: str) -> str:
        """A parameter's name without that of its module, if only one module is trained."""
        modules = {one.partition(":")[0] for one in self.recorded[0].stepped}
        return name.partition(":")[2] if len(modules) == 1 else name.replace(":", ".")

    def by_short_name(self, gradients: Gradients) -> dict[str, Tensor | None]:
        """The gradients by these names."""
        return {self.short(name): gradient for name, gradient in gradients.items()}

    def gradients(self, rank: int, kind: GradientKind) -> dict[str, Tensor | None]:
        """The gradients of a rank, of the parameters that its optimizer has."""
        return self.by_short_name(self.recorded[rank].gradients(kind))

    def gradients_of_ranks(self, kind: GradientKind) -> list[dict[str, Tensor | None]]:
        """Those of every rank."""
        return [self.gradients(rank, kind) for rank in self.ranks]

    def computed(self, answer: Step) -> dict[str, Tensor | None]:
        """The gradients that backward computed in one process, like the ``OWN`` of a rank."""
        return self.by_short_name(answer.computed)

    def weights(self) -> dict[str, Tensor]:
        """The weights of the parameters that are compared, at the beginning of the step."""
        names = self.recorded[0].held
        found: dict[str, Tensor] = {}
        for number in self.group:  # a module may have been called before an earlier step of these
            if number <= self.number:
                found |= self.record.step(0, number).states
        return {self.short(name): found[name] for name in names if name in found}

    # --- what the ranks read

    def digests_of_rows(self, rank: int) -> dict[str, str]:
        """A digest of everything that a rank read in the group of steps, by where it was read."""
        return {
            f"{number}/{place}/{path}": digest({path: tensor})
            for number in self.group
            for place, rows in enumerate(self.record.step(rank, number).read_rows)
            for path, tensor in rows.all_tensors()
        }

    def labels(self) -> dict[str, Tensor]:
        """The whole numbers and truth values that the ranks read with their rows, such as labels
        and masks: a loss may divide by their count. ``[rows, ...]``, padded where ranks differ.
        """
        parts: list[Part] = [
            (replace(rows, tensors=whole, entries={}), None)
            for rank in self.ranks
            for rows in self.record.read(rank, self.group)
            for whole in [{path: one for path, one in rows.tensors.items() if _is_whole(one)}]
        ]
        try:
            together = joined(parts)
        except ValueError:
            return {}
        return {
            re.sub(r"[^\w]+", ".", path).strip(".") or "inputs": tensor
            for path, tensor in together.tensors.items()
            if together.has_rows(path)
            and len(tensor) == len(self.rows)
            and tensor.numel() <= MOST_LABELS
        }


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def case_of(step: ScriptStep, kind: GradientKind) -> Case:
    """The case of a step. ``kind``: which gradients its loss leaves. Weights keep their dtypes."""
    weights = step.weights()

    def build() -> nn.Module:
        model = nn.Module()
        for name, weight in weights.items():
            *path, last = name.split(".")
            module: Any = model
            for part in path:
                module = module._modules.setdefault(part, nn.Module())
            module.register_parameter(last, nn.Parameter(weight.clone()))
        if step.recorded[0].batch_norm:  # a hypothesis asks whether there is one
            norm = nn.BatchNorm1d(1, affine=False, track_running_stats=False)
            model.add_module("batch norm of the script", norm)
        return model

    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        return {**step.labels(), ROWS: torch.arange(len(step.rows))}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        rows = tuple(batch[ROWS].tolist())
        if not rows:
            raise ValueError("the script is given at least one row")
        try:
            answer = step.answer(rows)
        except CannotReplay as error:
            raise ValueError(str(error)) from error
        found = step.by_short_name(answer.gradients(kind))
        parameters = dict(model.named_parameters())
        gradients = [found.get(name) for name in weights]
        trained = [parameters[name] for name in weights]
        result: Tensor = _Known.apply(sum(answer.losses), gradients, *trained)  # type: ignore[no-untyped-call]
        return result

    loss.__name__ = "loss_of_the_script"
    world_size = step.record.world_size
    local = step.record.runs[0].get("local_world_size") or world_size
    nodes, rest = divmod(world_size, local)
    layout = f"{nodes}x{local}" if nodes and not rest else f"1x{world_size}"
    return Case(model=build, batch=batch, loss=loss, layout=layout, shards="own", dtype=None)


class _Known(torch.autograd.Function):
    """A loss whose value and gradients are known."""

    @staticmethod
    def forward(
        ctx: Any, value: float, gradients: Sequence[Tensor | None], *parameters: Tensor
    ) -> Tensor:
        pairs = zip(gradients, parameters, strict=True)
        ctx.gradients = [None if one is None else one.to(weight.dtype) for one, weight in pairs]
        return parameters[0].new_tensor(value)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        scaled = [None if one is None else one * factor.to(one.dtype) for one in ctx.gradients]
        return None, None, *scaled


# How far gradients are from weighted sums of others, over all parameters.

ROUNDING_IN_LOW_PRECISION = 1e-3
"""What may be off below float64, relative to the norm: thousands of eps of float32. Gradients in
bfloat16 and float16 round more than this, so that nothing is said of them.
"""


def are_float64(gradients: Gradients) -> bool:
    """True if all of them are."""
    return all(one is None or one.dtype is torch.float64 for one in gradients.values())


def rounding_of(gradients: Gradients) -> float:
    """The error that may be rounding in gradients of this precision, relative to the norm."""
    return NEGLIGIBLE if are_float64(gradients) else ROUNDING_IN_LOW_PRECISION


def nearly_equal(one: Gradients, other: Gradients) -> bool:
    """True if the two are equal up to rounding."""
    return distance([(1.0, one), (-1.0, other)]) <= rounding_of(one)


def distance(terms: Sequence[tuple[float, Gradients]]) -> float:
    """The norm of the weighted sum, relative to that of the first term."""
    square = norm = 0.0
    for tensors in _in_float64([one for _, one in terms]):
        weighted = [weight * one for (weight, _), one in zip(terms, tensors, strict=True)]
        square += float(torch.stack(weighted).sum(0).square().sum())
        norm += float(tensors[0].square().sum())
    return float((square / norm) ** 0.5) if norm else float(square > 0)


def left_over(together: Gradients, parts: Sequence[Gradients]) -> float:
    """The part that no mixture explains, relative to the norm of the whole; 1 if that is zero,
    which shows nothing.
    """
    products = torch.zeros(len(parts) + 1, len(parts) + 1, dtype=torch.float64)
    for tensors in _in_float64([together, *parts]):
        rows = torch.stack(tensors).reshape(len(tensors), -1)
        products += rows @ rows.T
    of_parts, with_whole = products[1:, 1:], products[1:, 0]
    weights = torch.linalg.lstsq(of_parts, with_whole.unsqueeze(1)).solution.squeeze(1)
    left = products[0, 0] - 2 * weights @ with_whole + weights @ of_parts @ weights
    return float((left.clamp(min=0) / products[0, 0]).sqrt()) if products[0, 0] > 0 else 1.0


def _in_float64(several: Sequence[Gradients]) -> Iterator[list[Tensor]]:
    """For each parameter, its gradient in all of them; zero where it has none."""
    for name in dict.fromkeys(name for one in several for name in one):
        found = [one.get(name) for one in several]
        like = next((one for one in found if one is not None), None)
        if like is not None:
            zero = torch.zeros_like(like, dtype=torch.float64)
            yield [zero if one is None else one.double() for one in found]


# The step that was wrong, as the ranks make it once more and are watched line by line.

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


def what_to_look_at(
    step: ScriptStep, kind: GradientKind, sample: ElementSample[str]
) -> LookAt | None:
    """Say what is to be watched; None unless the parameters of one module are compared.
    ``kind``: the gradients that are compared. ``sample``: as in ``LookAt``.
    """
    recorded = step.recorded[0]
    modules = {name.partition(":")[0] for name in recorded.stepped}
    if len(modules) != 1 or len(step.group) != 1:
        return None
    rows = [
        [
            (unit[0], len(unit))
            for _, of in groupby(of_rank, key=lambda number: step.rows[number].micro_batch)
            for unit in [list(of)]
        ]
        for of_rank in step.rows_by_rank
    ]
    return LookAt(
        modules.pop(),
        sample,
        rows,
        clipped_after=len(recorded.losses) if recorded.clips and kind == BEFORE_CLIP else 0,
        operations=step.elements <= MOST_ELEMENTS,
    )


def seen_again(step: ScriptStep, again: Record, module: str) -> SecondRun:
    """Read what ``again`` shows of the step, in which this module was watched."""
    files = [rank_folder(again.folder, rank) / FILE for rank in step.ranks]
    if not all(file.exists() for file in files):
        return SecondRun()
    found = dict(enumerate(map(read_whole, files)))
    return SecondRun(
        {rank: observation for rank, (observation, _) in found.items()},
        {rank: ran for rank, (_, ran) in found.items() if ran is not None},
        module,
    )


def is_the_same(step: ScriptStep, again: Record) -> bool:
    """True if the ranks read the same rows again, and began with the same weights but for rounding.

    ``again``: holds that step alone. Devices may round otherwise in the steps before it.
    """
    recorded, repeated = step.recorded, [again.step(rank, again.steps[0]) for rank in step.ranks]
    if any(one.read != other.read for one, other in zip(recorded, repeated, strict=True)):
        return False
    before, after = recorded[0].states, repeated[0].states
    return before.keys() == after.keys() and all(
        torch.allclose(one.double(), after[name].double(), rtol=ROUNDING, atol=0.0, equal_nan=True)
        for name, one in before.items()
    )
