"""An observed step as ``check`` knows steps: its case, whose loss asks the script itself, its
analysis, and what was seen of it when the ranks ran once more.

So the comparison and the diagnosis of ``check`` need to know nothing of scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.case import Case
from ddp_equivalence.comparison.gradients import digest
from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.diagnosis.analysis import Analysis
from ddp_equivalence.diagnosis.draws import ReferenceDraws
from ddp_equivalence.diagnosis.localisation import Localisation, one_rank_shows_more
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE
from ddp_equivalence.diagnosis.view import View, with_measurement
from ddp_equivalence.diagnosis.where.divergence import (
    COARSEST,
    BesideOneRank,
    divergences,
    logs_of,
    past_autograd,
)
from ddp_equivalence.diagnosis.where.find_whereabouts import unless_it_fails
from ddp_equivalence.diagnosis.where.relations import Sharing
from ddp_equivalence.measurement.calls import Operations
from ddp_equivalence.measurement.measure import OneRank
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.observed_scripts.in_script.closer_look import FILE
from ddp_equivalence.observed_scripts.oracle import CannotReplay, Oracle
from ddp_equivalence.observed_scripts.queries import OF_RECORD, LookAt, State
from ddp_equivalence.observed_scripts.record import (
    BEFORE_CLIP,
    OWN,
    GradientKind,
    Record,
    Row,
    Step,
    rank_folder,
    read_whole,
)
from ddp_equivalence.observed_scripts.rows import Part, joined
from ddp_equivalence.report.verdict import Verdict

MOST_LABELS = 1 << 20
"""Tensors with more elements than this are not looked at as labels."""

ROWS = "rows of the step"
"""The leaf of the batch: the numbers of the rows in an observed step. No label has spaces in its
name.
"""


@dataclass(frozen=True)
class ScriptStep:
    """One step of a script. ``number``: of the step. ``group``: the steps that are computed
    together, see ``Record.groups``. ``rows``: all rows that the ranks read, in their order.
    ``before``: the step before the group; None if it is not known. ``state``: as in ``Query``.
    """

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

    def of_rank(self, rank: int) -> Step:
        """The record of a rank in the step."""
        return self.record.step(rank, self.number)

    @property
    def elements(self) -> int:
        """The number of elements of the weights and buffers."""
        return sum(one.numel() for one in self.of_rank(0).states.values())

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

    def computed(self, answer: Step) -> dict[str, Tensor | None]:
        """The gradients that backward computed in one process, like the ``OWN`` of a rank."""
        return self.by_short_name(answer.computed)

    def by_short_name(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The gradients, by the names that reports use."""
        return {self.short(name): gradient for name, gradient in gradients.items()}

    @property
    def everything(self) -> tuple[int, ...]:
        """The numbers of all rows."""
        return tuple(range(len(self.rows)))

    @property
    def rows_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the rows that each rank read."""
        return tuple(
            tuple(number for number, row in enumerate(self.rows) if row.rank == rank)
            for rank in self.ranks
        )

    def short(self, name: str) -> str:
        """A parameter's name without that of its module, if only one module is trained."""
        modules = {one.partition(":")[0] for one in self.of_rank(0).stepped}
        return name.partition(":")[2] if len(modules) == 1 else name.replace(":", ".")

    def gradients(self, rank: int, kind: GradientKind) -> dict[str, Tensor | None]:
        """The gradients of a rank, of the parameters that its optimizer has."""
        return self.by_short_name(self.of_rank(rank).gradients(kind))

    def digests_of_rows(self, rank: int) -> dict[str, str]:
        """A digest of everything that a rank read in the group of steps, by where it was read."""
        found = {}
        for number in self.group:
            for place, rows in enumerate(self.record.step(rank, number).read_rows):
                for path, tensor in rows.all_tensors():
                    found[f"{number}/{place}/{path}"] = digest({path: tensor})
        return found

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

    def weights(self) -> dict[str, Tensor]:
        """The weights of the parameters that are compared, at the beginning of the step."""
        names = self.of_rank(0).held
        found: dict[str, Tensor] = {}
        for number in self.group:  # a module may have been called before an earlier step of these
            weights = self.record.step(0, number).states
            if number <= self.number:
                found |= {name: weights[name] for name in names if name in weights}
        return {self.short(name): found[name] for name in names if name in found}


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def as_case(step: ScriptStep, kind: GradientKind) -> Case:
    """The case of a step. ``kind``: which gradients its loss leaves. Weights keep their dtypes."""
    weights = step.weights()
    order = tuple(weights)

    def build() -> nn.Module:
        model = _model(weights)
        if step.of_rank(0).batch_norm:  # a hypothesis asks whether there is one
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
        parameters = dict(model.named_parameters())
        found = step.by_short_name(answer.gradients(kind))
        value = sum(answer.losses)
        gradients = [found.get(name) for name in order]
        result: Tensor = _Known.apply(value, gradients, *(parameters[name] for name in order))  # type: ignore[no-untyped-call]
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
        ctx.gradients = gradients
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        return parameters[0].new_tensor(value)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        return (
            None,
            None,
            *(
                None if gradient is None else gradient.to(dtype) * factor.to(dtype)
                for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
            ),
        )


def _model(weights: Mapping[str, Tensor]) -> nn.Module:
    """A module with these parameters, under their names."""
    root = nn.Module()
    for name, weight in weights.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            inside = module._modules[part]
            assert inside is not None
            module = inside
        module.register_parameter(last, nn.Parameter(weight.clone()))
    return root


# How far gradients are from weighted sums of others, over all parameters.

ROUNDING_IN_LOW_PRECISION = 1e-3
"""What may be off below float64, relative to the norm: thousands of eps of float32. Gradients in
bfloat16 and float16 round more than this, so that nothing is said of them.
"""

Gradients = Mapping[str, Tensor | None]


def rounding_of(gradients: Gradients) -> float:
    """The error that may be rounding in gradients of this precision, relative to the norm."""
    dtypes = {gradient.dtype for gradient in gradients.values() if gradient is not None}
    return NEGLIGIBLE if dtypes <= {torch.float64} else ROUNDING_IN_LOW_PRECISION


def distance(terms: Sequence[tuple[float, Gradients]]) -> float:
    """The norm of the weighted sum, relative to that of the first term."""
    square = norm = 0.0
    for tensors in _in_float64([one for _, one in terms]):
        weighted = [weight * one for (weight, _), one in zip(terms, tensors, strict=True)]
        square += float(torch.stack(weighted).sum(0).square().sum())
        norm += float(tensors[0].square().sum())
    return float((square / norm) ** 0.5) if norm else float(square > 0)


def nearly_equal(one: Gradients, other: Gradients) -> bool:
    """True if the two are equal up to rounding."""
    return distance([(1.0, one), (-1.0, other)]) <= rounding_of(one)


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
        if any(one is not None for one in found):
            like = next(one for one in found if one is not None).double()
            yield [torch.zeros_like(like) if one is None else one.double() for one in found]


def holds_the_mean_of_own(step: ScriptStep, more: GradientKind | None = None) -> bool:
    """True if every rank holds the mean of what the ranks computed. ``more``: a kind of gradients
    that is added to each rank's own.
    """
    kinds = (OWN, more) if more else (OWN,)
    computed = [step.gradients(rank, kind) for rank in step.ranks for kind in kinds]
    terms = [(-1.0 / len(step.ranks), one) for one in computed]
    held = [step.gradients(rank, BEFORE_CLIP) for rank in step.ranks]
    return all(distance([(1.0, one), *terms]) <= rounding_of(one) for one in held)


# What is costly to know of a step that differs, computed when it is asked for.

MARKED = "> marks where the ranks part from one process that has all rows."


class AnalysisOfScript(Analysis):
    """An analysis of a step that no rank can run again, since it is a part of a script.

    ``kind``: which gradients are compared. ``second``: the second run, set before it is asked for.
    """

    def __init__(
        self, request: Request, expected: Expected, step: ScriptStep, kind: GradientKind
    ) -> None:
        super().__init__(request, expected)
        self.step, self.kind, self.second = step, kind, SecondRun()

    @cached_property
    def beside(self) -> BesideOneRank | None:
        """What the ranks did otherwise than one process that has all rows."""
        view, best = self.view, self.explanations[0] if self.explanations else None
        believed = best if best is not None and best.accepted else None
        if view is None or not self.second.operations or not one_rank_shows_more(believed):
            return None
        largest = float(view.expected.abs().max())
        with suppress(CannotReplay):
            return unless_it_fails(
                lambda: _beside(self.step, self.second, largest), lambda why: None
            )
        return None

    @property
    def order_matters(self) -> bool:
        """True if the script computes another gradient for its rows in another order."""
        return self._expected.rounding.order_matters

    @cached_property
    def localisation(self) -> Localisation:
        """As for a step; but one process is what the ranks are compared with, so that nothing is
        said of whether it is right.
        """
        found = super().localisation
        seen = found.whereabouts
        if seen is None or not seen.beside_one_rank:
            return found
        marks = MARKED if seen.marks else ""
        return replace(found, whereabouts=replace(seen, beside_one_rank="", marks=marks))

    @cached_property
    def draws(self) -> ReferenceDraws | None:
        """None: the script itself draws for its big batch what the ranks drew."""
        return None

    @cached_property
    def view_of_own_draws(self) -> View | None:
        """The view of the step. On one rank the script computes the big batch, by definition."""
        if self.measurement is None or self.why_no_view:
            return None
        view, other_bits = self._view_of_step(0), self.repeated is False
        seen = view and with_measurement(view, self.measurement, self.observed, 0, other_bits)
        return seen and replace(seen, factor_on_one_rank=lambda: 1.0)


def _beside(step: ScriptStep, second: SecondRun, largest: float) -> BesideOneRank | None:
    """``largest``: element of the gradient of all rows. Raises CannotReplay."""
    oracle, by_rank = step.oracle, second.operations
    if oracle is None or len(by_rank) < step.record.world_size:
        return None
    alone = oracle.logged(step.group, step.rows, second.module)
    if alone is None or not all(one.complete for one in (alone, *by_rank.values())):
        return None
    dtypes = {value.dtype for value in alone.values if value.is_floating_point} or {"float64"}
    eps = max(torch.finfo(getattr(torch, name)).eps for name in dtypes)
    order = oracle.order_of(step.group, step.rows)
    if eps > COARSEST or sorted(order) != sorted(range(len(step.rows))):
        return None  # some rows are in several micro-batches
    place = {row: number for number, row in enumerate(order)}
    rows = tuple(tuple(place[row] for row in of_rank) for of_rank in step.rows_by_rank)
    logs = logs_of(OneRank(by_rank, alone), Sharing(rows, len(order), eps, largest))
    return BesideOneRank(
        is_right_alone=True,
        factor_alone=1.0,
        divergences=divergences(logs),
        past_autograd=past_autograd(logs),
    )


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


def what_to_look_at(step: ScriptStep, verdict: Verdict) -> LookAt | None:
    """Say what is to be watched; None unless the parameters of one module are compared."""
    modules = {name.partition(":")[0] for name in step.of_rank(0).stepped}
    analysis, recorded = verdict.analysis, step.of_rank(0)
    if not isinstance(analysis, AnalysisOfScript) or len(modules) != 1 or len(step.group) != 1:
        return None
    before_clip = recorded.clips and analysis.kind == BEFORE_CLIP
    return LookAt(
        modules.pop(),
        analysis.sample_of_step(0),
        _rows(step),
        clipped_after=len(recorded.losses) if before_clip else 0,
        operations=step.elements <= MOST_ELEMENTS,
    )


def seen_again(step: ScriptStep, again: Record, module: str) -> SecondRun:
    """Read what ``again`` shows of the step, in which this module was watched."""
    observations, operations = dict[int, Observation](), dict[int, Operations]()
    for rank in step.ranks:
        folder = rank_folder(again.folder, rank)
        if not (folder / FILE).exists():
            return SecondRun()
        observations[rank], of_rank = read_whole(folder / FILE)
        if of_rank is not None:
            operations[rank] = of_rank
    return SecondRun(observations, operations, module)


def is_the_same(step: ScriptStep, again: Record) -> bool:
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


def _rows(step: ScriptStep) -> list[list[tuple[int, int]]]:
    """For each rank, the number of the first row of every micro-batch, and how many it has."""
    found: list[list[tuple[int, int]]] = []
    for rows in step.rows_by_rank:
        units = (list(of) for _, of in groupby(rows, key=lambda n: step.rows[n].micro_batch))
        found.append([(unit[0], len(unit)) for unit in units])
    return found
