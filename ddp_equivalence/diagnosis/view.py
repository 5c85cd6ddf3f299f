"""What every hypothesis gets of one step: what was expected, measured, and observed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.build import build_whole_batch
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.shards import OWN, split
from ddp_equivalence.case.training import Compare, GradientKey, Steps, Training
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.gradients import ElementSample, data_by_rank, digest
from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.diagnosis.example_gradients import (
    BatchParts,
    ExampleGradients,
    GradientCache,
    ParameterElements,
    PartsByRank,
    without_ranks,
)
from ddp_equivalence.diagnosis.residual import fitted_mixture, nearest_factor, nearly_equal
from ddp_equivalence.diagnosis.rows_read import ExamplesRead, examples_read
from ddp_equivalence.diagnosis.setting import Setting, StepCalls, calls_of_all_steps
from ddp_equivalence.diagnosis.time_left import TimeLeft
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.call_watch import MOST_LINES
from ddp_equivalence.measurement.calls import CodeLine, unpacked
from ddp_equivalence.measurement.measure import Measurement, work_of
from ddp_equivalence.measurement.observation import Backward, Observation, Wrapper
from ddp_equivalence.measurement.observer import LocalsSeen
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.ranks.collectives import FORGOTTEN, Collective
from ddp_equivalence.reference import Reference, big_batch
from ddp_equivalence.strategies.sharded_batch import Indices

MicroBatchGradients = tuple[tuple[Tensor, ...], ...]
"""For every rank, what each of its micro-batches adds to its local gradient, shape (elements,)."""


HALF_PRECISION = {"Half": torch.float16, "BFloat16": torch.bfloat16}
"""The types of half precision, by their names in torch's flight recorder."""

LARGEST_ROUNDING = 2.0
"""The most that a reduction in half precision moves an element, in eps of its type and relative to
what the ranks add up. It moved none by more than 1.0 on up to eight ranks."""


@dataclass(frozen=True)
class View:
    """Everything that a hypothesis may ask about one step.

    ``setting``: what is known before the ranks run. ``parameters``: the elements of the vectors.
    ``examples``: the gradient of any examples. ``parts``: the examples whose gradients the ranks
    average. ``measured``: what the ranks hold after the step. ``observed``: what they were seen to
    do. Before the ranks have run, nothing is measured or observed.

    ``factor_on_one_rank``: runs the step on one rank with the whole batch, and returns what it
    leaves there, in multiples of the big batch's gradient; None if that is not known.
    """

    setting: Setting
    parameters: ParameterElements
    examples: ExampleGradients
    parts: BatchParts
    measured: MeasuredGradients
    observed: ObservedStep
    factor_on_one_rank: Callable[[], float | None] = lambda: None

    @classmethod
    def before_the_run(
        cls,
        setting: Setting,
        sample: ElementSample[str],
        expected: Tensor,
        earlier_expected: tuple[Tensor, ...],
        parts: PartsByRank | None,
        cache: GradientCache,
        time: TimeLeft,
    ) -> View:
        """The view of a step that no rank has run yet.

        ``expected``: the gradient of the step's big batch, shape (elements,); ``earlier_expected``:
        those of the steps before. ``time``: what explaining a difference may still take.
        """
        parameters = ParameterElements(sample)
        examples = ExampleGradients(setting, parameters, expected, earlier_expected, cache, time)
        return cls(
            setting=setting,
            parameters=parameters,
            examples=examples,
            parts=BatchParts(parts, examples),
            measured=MeasuredGradients(torch.empty(0), frozenset(), expected, parameters),
            observed=ObservedStep(setting, {}),
        )

    @property
    def expected(self) -> Tensor:
        """The gradient of the big batch, shape (elements,)."""
        return self.examples.expected

    @property
    def expected_by_rank(self) -> Tensor:
        """The gradient of the big batch on every rank: shape (reporting ranks, elements)."""
        return self.on_every_rank(self.expected)

    @property
    def world_size(self) -> int:
        return self.setting.world_size

    @property
    def time(self) -> TimeLeft:
        """What explaining the difference may still take."""
        return self.examples.time

    def on_every_rank(self, vector: Tensor) -> Tensor:
        """The same vector on every rank: shape (reporting ranks, elements)."""
        return vector.expand(len(self.setting.reporting_ranks), -1)

    def on_reporting_ranks(self, rows: Tensor) -> Tensor:
        """The rows of the ranks that report, from one row for every rank of the layout."""
        return rows[list(self.setting.reporting_ranks)]

    @cached_property
    def observed_gradients(self) -> MicroBatchGradients | None:
        """The gradients that each backward was seen to compute; None unless all ranks are known."""
        if not self.observed.covers_every_rank:
            return None
        by_rank = []
        for rank in range(self.world_size):
            gradients = tuple(
                self.setting.scale * call.gradient
                for call in self.observed.backwards(rank)
                if call.gradient is not None
            )
            if any(len(gradient) != len(self.expected) for gradient in gradients):
                return None
            by_rank.append(gradients or (torch.zeros_like(self.expected),))
        return tuple(by_rank)

    @cached_property
    def micro_batch_gradients(self) -> tuple[MicroBatchGradients, ...]:
        """What each micro-batch may have added to its rank's local gradient: all candidates.

        There are up to three: the gradients that were observed; the gradient of each part, divided
        by the number of the rank's parts; and the gradient of the examples that were read,
        multiplied by the loss at which backward began and divided by the loss of these examples.
        """
        candidates = [] if self.observed_gradients is None else [self.observed_gradients]
        gradient = self.examples.gradient
        if self.parts.by_rank is not None:
            candidates.append(
                tuple(
                    tuple(gradient(part) / len(of_rank) for part in of_rank)
                    for of_rank in self.parts.by_rank
                )
            )
        losses, read = self.losses_of_backwards or (), self.observed.examples_read or ()
        if losses and all(own and begun is not None for one in losses for begun, own in one):
            candidates.append(
                tuple(
                    tuple(
                        (begun or 0.0) / own * gradient(part)
                        for (begun, own), part in zip(of_rank, parts, strict=True)
                    )
                    for of_rank, parts in zip(losses, read, strict=True)
                )
            )
        return tuple(candidates)

    @cached_property
    def losses_of_backwards(self) -> tuple[tuple[tuple[float | None, float], ...], ...] | None:
        """For every backward of every rank: the loss at which it began, None if that is unknown,
        and that of the examples that it read.

        None if it is not known what each of them read.
        """
        if self.observed.examples_read is None:
            return None
        by_rank = []
        for rank, micro_batches in enumerate(self.observed.examples_read):
            begun_at = [call.loss for call in self.observed.backwards(rank)]
            if len(begun_at) != len(micro_batches):
                return None
            by_rank.append(
                tuple(zip(begun_at, map(self.examples.loss, micro_batches), strict=True))
            )
        return tuple(by_rank)

    @cached_property
    def local_gradients(self) -> tuple[Tensor, ...]:
        """What each rank may have computed before any reduction: all candidates, the likeliest
        first, each of shape (world size, elements) and finite.
        """
        distinct: list[Tensor] = []
        for by_rank in self.micro_batch_gradients:
            local = torch.stack([torch.stack(micro_batches).sum(0) for micro_batches in by_rank])
            is_new = not any(nearly_equal(local, earlier) for earlier in distinct)
            if bool(local.isfinite().all()) and is_new:
                distinct.append(local)
        return tuple(distinct)

    @cached_property
    def weights_of_ranks(self) -> Tensor | None:
        """The weight of each rank's local gradient in what each rank holds.

        Shape (reporting ranks, world size); None if the weights cannot be determined.
        """
        if not self.local_gradients:
            return None
        return self.measured.weights_of(self.local_gradients[0])

    def rounding_in(self, dtype: torch.dtype) -> Tensor:
        """How far a reduction in this type may have moved each element, shape (elements,).

        Where local gradients are not known, the largest element of the big batch stands for them.
        """
        of_type, largest = torch.finfo(dtype), self.expected.abs().max()
        sizes = self.world_size * largest.expand_as(self.expected)
        if self.local_gradients:
            mean = self.on_every_rank(self.local_gradients[0].mean(0))
            added = [torch.stack(one).abs().sum(0) for one in self.micro_batch_gradients[0]]
            factor = nearest_factor(self.measured.by_rank, mean) or 0.0
            sizes = abs(factor) * torch.stack(added).mean(0)
        return LARGEST_ROUNDING * of_type.eps * (sizes + of_type.smallest_normal)

    @cached_property
    def eps(self) -> float:
        """That of the model, or of the lowest precision in which every rank has called modules."""
        lowest = []
        for seen in self.observed.by_rank.values():
            names = {name for call in seen.trace.module_calls for name in call.dtypes}
            dtypes = [getattr(torch, name) for name in names]
            lowest.append(max((torch.finfo(one).eps for one in dtypes), default=0.0))
        own = torch.finfo(self.setting.dtype).eps
        return max(own, min(lowest, default=0.0))

    @cached_property
    def rounding(self) -> Tensor | None:
        """How far the reductions in half precision that were seen may have moved each element.

        None if there are none, or if their rounding alone explains what the ranks hold.
        """
        types = [HALF_PRECISION[name] for names in self.observed.reduced_in_half for name in names]
        dtype = max(types, key=lambda one: torch.finfo(one).eps, default=self.setting.dtype)
        is_narrow = torch.finfo(dtype).eps > torch.finfo(self.setting.dtype).eps
        if not is_narrow or not self.local_gradients:
            return None
        rounding, error = self.rounding_in(dtype), self.measured.by_rank - self.expected
        return None if bool((error.abs() <= rounding).all()) else rounding

    def averages_of_node_sums(self) -> list[Tensor]:
        """The local gradients, added up inside each node and averaged over the nodes.

        Empty unless the strategy reduces like this. A plain mean or sum over all ranks is not
        among these candidates, because it is predicted from the parts of the batch.
        """
        layout = self.setting.layout
        if not self.setting.sums_in_nodes or layout.nodes == layout.world_size:
            return []
        return [local.sum(0) / layout.nodes for local in self.local_gradients]


def expected_of(request: Request, model: nn.Module | None = None) -> Expected:
    """The reference of a request, and the digests of what its ranks must be given. ``model``: that
    of the case, if it has been built already.

    Raises BadCase whenever the case's model, batch or loss is at fault.
    """
    case = request.case
    if case.is_catalogue and not request.at_each_step and not request.read_order:
        return _expected_of_catalogue(
            without_ranks(case), request.compare, request.training, request.steps
        )
    whole, sizes = build_whole_batch(case, request.steps)
    strategy = request.strategy
    data = data_by_rank(
        case,
        whole,
        sizes,
        undivided=strategy is not None and strategy.one_process,
        together=work_of(request).is_given_all_at_once,
    )
    reference = big_batch(
        case,
        request.compare,
        request.training,
        request.steps,
        (as_read(request, whole), sizes),
        request.at_each_step,
        request.after_clipping,
        model,
    )
    return Expected(reference, None if case.is_catalogue else data, request.read_order)


def as_read(request: Request, whole: Any) -> Any:
    """The batch of all steps, in the order in which the steps read it."""
    order = request.read_order
    return take(whole, order, request.case.batch_dims) if order else whole


def check_shards(request: Request, reference: Reference) -> None:
    """Raises BadCase if the examples cannot be assigned to ranks as the case says."""
    case = request.case
    for examples in reference.examples if case.shards != OWN else ():
        split(case.shards, examples, case.ranks.world_size)


@lru_cache(maxsize=128)
def _expected_of_catalogue(
    case: Case, compare: Compare, training: Training, steps: Steps
) -> Expected:
    """Kept for the next check, since many strategies are compared with the same big batch."""
    return Expected(big_batch(case, compare, training, steps))


def with_measurement(
    view: View,
    measurement: Measurement,
    observed: Mapping[int, Observation],
    step: int,
    left_other_bits: bool,
) -> View:
    """The view with what the ranks hold after this step, and with what they were seen to do.

    ``left_other_bits``: True if the watched second run left other gradients than the first. The
    micro-batches of a user's own step are known only from the examples that it was seen to read.
    """
    comparison, ranks = measurement.comparison, view.setting.reporting_ranks
    differing = {p.key for p in comparison.parameters if not (p.same and p.ranks_agree)}
    measured = replace(
        view.measured,
        by_rank=torch.stack([_joined(view, measurement.measured[rank], step) for rank in ranks]),
        differing=frozenset(name for name in view.parameters.names if (step, name) in differing),
    )
    observed_step = replace(
        view.observed,
        by_rank=observed,
        left_other_bits=left_other_bits,
        first_run={rank: one.collectives for rank, one in measurement.evidence.items()},
    )
    with_both = replace(view, measured=measured, observed=observed_step)
    read = observed_step.examples_read
    if not view.setting.case.is_catalogue and read is not None and _read_own_shards(view, read):
        return replace(with_both, parts=replace(with_both.parts, by_rank=read))
    return with_both


def first_wrong_step(comparison: Comparison, steps: int) -> int:
    """The first step with a parameter beyond its limit: the weights before it were still right."""
    return min((parameter.key[0] for parameter in comparison.differing), default=steps - 1)


def left_same_bits(
    measured: Mapping[int, Mapping[GradientKey, Tensor]], observed: Mapping[int, Observation]
) -> bool | None:
    """True if the second run left the same bits on every rank; None if there was no second run."""
    if not observed:
        return None
    return all(
        digest({key[1]: gradient}) == observed[rank].gradients.get(key)
        for rank, gradients in measured.items()
        for key, gradient in gradients.items()
        if rank in observed
    )


def _joined(view: View, measured: Mapping[GradientKey, Tensor], step: int) -> Tensor:
    """The sampled elements of all parameters in this step, shape (elements,)."""
    names = view.parameters.names
    return view.parameters.sample.joined(
        {name: measured[step, name] for name in names if (step, name) in measured}
    )


def _read_own_shards(view: View, read: tuple[tuple[Indices, ...], ...]) -> bool:
    """True if each rank read the examples that it was given, or if it was given none."""
    if view.setting.shards is None:
        return True
    return all(
        sorted(index for part in parts for index in part) == sorted(shard)
        for parts, shard in zip(read, view.setting.shards, strict=True)
    )


@dataclass(frozen=True)
class MeasuredGradients:
    """What every reporting rank holds after the step.

    ``by_rank``: shape (reporting ranks, elements); it is empty before anything was measured.
    ``differing``: the parameters that are beyond their limits or differ between ranks.
    ``expected``: the gradient of the big batch.
    """

    by_rank: Tensor
    differing: frozenset[str]
    expected: Tensor
    parameters: ParameterElements

    @property
    def is_known(self) -> bool:
        """False before anything was measured."""
        return self.by_rank.numel() > 0

    @property
    def is_finite(self) -> bool:
        return bool(self.by_rank.isfinite().all())

    @cached_property
    def ranks_differ(self) -> bool:
        """True if the ranks hold different gradients, beyond rounding."""
        return not nearly_equal(self.by_rank, self.by_rank.mean(0).expand_as(self.by_rank))

    @property
    def only_some_parameters_differ(self) -> bool:
        return 0 < len(self.differing) < len(self.parameters.names)

    @cached_property
    def factor(self) -> float | None:
        """The number k for which k times the big batch is nearest to what the ranks hold."""
        return nearest_factor(self.by_rank, self.expected.expand_as(self.by_rank))

    def weights_of(self, gradients: Tensor) -> Tensor | None:
        """The weight of each of these gradients in what each rank holds, by least squares.

        ``gradients``: shape (gradients, elements). Returns shape (reporting ranks, gradients), or
        None where the gradients cannot be told apart.
        """
        return fitted_mixture(gradients, self.by_rank).weights


WHOLE_NUMBERS = ("Bool", "Byte", "Char", "Short", "Int", "Long")
"""The names of types without fractions in torch's flight recorder: no gradient has one."""


@dataclass(frozen=True)
class ObservedStep:
    """The observations of the ranks.

    ``by_rank``: rank -> what was seen of it; empty where the step did not run a second time.
    ``left_other_bits``: the second run left other gradients than the first. ``first_run``: rank ->
    the collectives of the first run, which are used where nothing was seen of a second one.
    ``examples_computed``: the micro-batches of each rank, as its gradients show them where its rows
    were not recognised.
    """

    setting: Setting
    by_rank: Mapping[int, Observation]
    left_other_bits: bool = False
    first_run: Mapping[int, tuple[Collective, ...] | None] = field(default_factory=dict)
    examples_computed: PartsByRank | None = None

    @property
    def covers_every_rank(self) -> bool:
        return sorted(self.by_rank) == list(range(self.setting.world_size))

    def backwards(self, rank: int) -> list[Backward]:
        """The calls of backward on this rank in this step."""
        calls = self.by_rank[rank].backwards
        return [call for call in calls if call.step == self.setting.step]

    @cached_property
    def calls(self) -> StepCalls:
        """The calls of this step that matter for the gradients, with their lines."""
        step = self.setting.step
        return StepCalls(
            {
                rank: tuple(call for call in seen.calls if call.step == step)
                for rank, seen in self.by_rank.items()
            }
        )

    @cached_property
    def calls_of_all_steps(self) -> StepCalls:
        """The calls of this step and all others."""
        return calls_of_all_steps(self.by_rank)

    @cached_property
    def lines_run(self) -> Mapping[int, tuple[CodeLine, ...]]:
        """Rank -> the lines of the user's code that it ran in this step, each once, in order.

        Empty if a rank ran more lines than are remembered.
        """
        step = self.setting.step
        if any(len(seen.lines_run) >= MOST_LINES for seen in self.by_rank.values()):
            return {}
        return {
            rank: tuple(line for number, line in seen.lines_run if number == step)
            for rank, seen in self.by_rank.items()
        }

    @cached_property
    def examples_read(self) -> PartsByRank | None:
        """The micro-batches that each rank read; None unless they are known for every rank."""
        if self._read is None:
            return self.examples_computed
        first = self.setting.first_example
        return tuple(
            tuple(tuple(index - first for index in part) for part in parts)
            for parts in self._read.by_rank
        )

    @cached_property
    def times_read(self) -> Counter[int]:
        """Example -> the number of times that it was read on all ranks together."""
        if self._read is None and self.examples_computed is not None:
            return Counter(i for parts in self.examples_computed for part in parts for i in part)
        times = Counter[int]() if self._read is None else self._read.times
        return Counter({i - self.setting.first_example: count for i, count in times.items()})

    @cached_property
    def equal_where_read(self) -> frozenset[int]:
        """The examples that equal other ones in what was read, so that either may have been."""
        equal = frozenset[int]() if self._read is None else self._read.equal
        return frozenset(index - self.setting.first_example for index in equal)

    @cached_property
    def _read(self) -> ExamplesRead | None:
        """What was read of the examples of all steps."""
        if not self.covers_every_rank:
            return None
        first, shards = self.setting.first_example, self.setting.shards
        dealt = None
        if shards is not None:
            dealt = {
                rank: tuple(first + index for index in shard) for rank, shard in enumerate(shards)
            }
        read = examples_read(self.by_rank, self.setting.step, dealt)
        last = first + self.setting.example_count
        known = read is not None and all(first <= index < last for index in read.times)
        return read if known else None

    def parts_of_ranks(self, parameters: ParameterElements) -> Tensor | None:
        """Which elements of the sample each rank has where gradients are sharded, as its own memory
        shows them: shape (world size, elements), of True and False. None if no gradient is sharded,
        or if some parts are not known.
        """
        if not self.covers_every_rank or not any(one.parts for one in self.by_rank.values()):
            return None
        elements = sum(place.stop - place.start for place in parameters.places.values())
        has = torch.ones(self.setting.world_size, elements, dtype=torch.bool)
        for rank, seen in self.by_rank.items():
            for name, numbers in seen.parts.items():
                place = parameters.places.get(name)
                if bool((unpacked(numbers) < 0).any()):
                    return None
                if place is not None:
                    has[rank, place] = False
                    has[rank, place.start + unpacked(numbers).long()] = True
        return has

    @property
    def records_draws(self) -> bool:
        """True if it is known of every rank which random numbers it drew."""
        return self.covers_every_rank and all(
            seen.draws is not None for seen in self.by_rank.values()
        )

    @property
    def wrappers(self) -> list[Wrapper]:
        """Every DistributedDataParallel that was made around the model, on any rank."""
        return [wrapper for seen in self.by_rank.values() for wrapper in seen.wrappers]

    @property
    def reduced_floats(self) -> int | None:
        """How many elements every rank, at least, all-reduced or reduce-scattered, without tensors
        of whole numbers. The first run is used if need be.

        None if that is not known, because torch's flight recorder is missing or has lost entries.
        """
        logs = [seen.collectives for seen in self.by_rank.values()] or [*self.first_run.values()]
        totals = [
            sum(
                entry.elements
                for entry in log
                if "reduce" in entry.op and entry.dtype.rpartition(":")[2] not in WHOLE_NUMBERS
            )
            for log in logs
            if log is not None and all(entry.op != FORGOTTEN for entry in log)
        ]
        return min(totals) if totals and len(totals) == len(logs) else None

    @cached_property
    def reduced_in_half(self) -> list[set[str]]:
        """For every rank, the types of half precision in which it reduced more than one number."""
        logs = [seen.collectives or () for seen in self.by_rank.values()]
        reduced = [[one for one in log if "reduce" in one.op and one.elements > 1] for log in logs]
        return [
            {one.dtype.rpartition(":")[2] for one in log} & HALF_PRECISION.keys() for log in reduced
        ]

    @property
    def a_rank_gathered(self) -> bool:
        """True if a rank gathered more than single elements."""
        logs = [seen.collectives or () for seen in self.by_rank.values()]
        return any("gather" in entry.op and entry.elements > 1 for log in logs for entry in log)


def lines_of_the_big_batch(
    case: Case, compare: Compare = "gradients", training: Training | None = None, steps: Steps = 1
) -> Mapping[str, set[int]]:
    """File -> the lines of the user's code that compute the gradients of the big batch.

    They are not known if somebody else traces this thread, such as a debugger.
    """
    if sys.gettrace() is not None:
        return {}
    seen = LocalsSeen()
    with without_planted_faults(), seen.watching():
        big_batch(case, compare, training, steps)
    return seen.lines
