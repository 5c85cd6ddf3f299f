"""The loss and the gradient of any examples of the big batch; every prediction is made of these."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.build import build_model, untie
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.training import Steps, Training
from ddp_equivalence.comparison.gradients import ElementSample
from ddp_equivalence.diagnosis.draw_table import DrawTable
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE, nearly_equal, unexplained
from ddp_equivalence.diagnosis.setting import Setting
from ddp_equivalence.diagnosis.time_left import TimeLeft
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.calls import CodeLine, Operations
from ddp_equivalence.measurement.draws import Draw, DrawReplay
from ddp_equivalence.measurement.operation_log import OperationLog
from ddp_equivalence.ranks.deadlines import threads_for
from ddp_equivalence.reference import in_dtype, loss_of_the_case, train
from ddp_equivalence.strategies.sharded_batch import Indices

MUCH_ROUNDING = 100.0
"""Two computations of one gradient differ by less than so many times eps, relative to its norm."""


@dataclass(frozen=True)
class LossAndGradient:
    """The loss of some examples, and its gradient, shape (elements,).

    ``drew``: the forward pass drew random numbers. ``terms``: the loss is the sum of so many.
    """

    loss: float
    gradient: Tensor
    drew: bool = False
    terms: int = 1


GradientCache = dict[tuple[Indices, bytes], LossAndGradient]
"""(examples, state of torch's generator) -> the loss and gradient that were computed for them."""


Divided = Mapping[tuple[CodeLine | None, str, int], tuple[float, str]]
"""Where a loss may divide, as ``divisors`` knows it -> the number, and what it counts, in words."""


@dataclass(frozen=True)
class ExampleGradients:
    """Computes the loss and the gradient of any examples, in float64, and remembers them.

    ``expected``: the gradient of the big batch, shape (elements,). ``earlier_expected``: the
    gradients of the earlier steps' big batches. ``time``: counts what computing them takes; a
    gradient that there is no time for raises OutOfTime.
    ``draws``: the random numbers that are drawn for every example, if they are given.
    ``adds_up``: the gradient of the big batch is then the sum of those of parts, not their mean.
    ``divided_by``: examples -> the numbers by which their loss was seen to divide, if it was asked.
    """

    setting: Setting
    parameters: ParameterElements
    expected: Tensor
    earlier_expected: tuple[Tensor, ...] = ()
    cache: GradientCache = field(default_factory=dict)
    time: TimeLeft = field(default_factory=TimeLeft)
    draws: DrawTable | None = None
    adds_up: bool = False
    divided_by: dict[Indices, Divided] = field(default_factory=dict)

    def gradient(self, examples: Indices) -> Tensor:
        """The gradient of these examples alone, shape (elements,); NaN if they have no loss."""
        return self.compute(examples).gradient

    def loss(self, examples: Indices) -> float:
        """The loss of these examples alone; NaN if they have none."""
        return self.compute(examples).loss

    @property
    def big_batch_loss(self) -> float:
        return self.loss(tuple(range(self.setting.example_count)))

    @property
    def give_what_is_expected(self) -> bool:
        """True if the loss of the case has the gradient that ranks are compared with. A reference
        of the user's own may have another one.
        """
        rounding = max(NEGLIGIBLE, MUCH_ROUNDING * torch.finfo(self.setting.dtype).eps)
        found = self.gradient(tuple(range(self.setting.example_count)))
        return unexplained(found, self.expected) < rounding

    @cached_property
    def draws_random_numbers(self) -> bool:
        """True if the big batch has another gradient with other random numbers.

        Raises OutOfTime.
        """
        if self.draws is not None:
            return False  # they are given
        everything = tuple(range(self.setting.example_count))
        known = [one for (part, _), one in self.cache.items() if part and one.loss == one.loss]
        if not (known or [self.compute(everything)])[0].drew:
            return False
        other = self._computed(everything, Conditions(other_numbers=True))
        return not nearly_equal(other.gradient, self.compute(everything).gradient)

    def data_independent_gradient(self) -> Tensor | None:
        """The gradient of the loss's terms that do not depend on the data; None if it has none."""
        gradient = self.gradient(())
        return gradient if bool(gradient.isfinite().all()) and bool(gradient.any()) else None

    def terms(self, examples: Indices) -> list[Tensor]:
        """The gradients of the terms that the loss of these examples is the sum of, each of shape
        (elements,); [] if it has no terms, or too many.
        """
        found = []
        for number in range(MOST_TERMS):
            alone = self._computed(examples, Conditions(only_term=number))
            if number >= alone.terms:
                break
            found.append(alone.gradient)
        whole = self.gradient(examples)
        is_sum = alone.terms == len(found) > 1 and nearly_equal(whole, torch.stack(found).sum(0))
        return found if is_sum else []

    def untied(self) -> Tensor:
        """The gradient of the big batch, shape (elements,), in which a weight that the model has in
        several places gets only what the first of them gives.
        """
        everything = tuple(range(self.setting.example_count))
        return self._computed(everything, Conditions(untied=True)).gradient

    def compute(
        self, examples: Indices, generator: bytes = b"", buffers: Mapping[str, Tensor] | None = None
    ) -> LossAndGradient:
        """The loss and gradient of these examples alone.

        ``generator``: the state that torch's generator gets before the forward pass; if it is
        empty, the generator starts from the seed of the step. ``buffers``: what the buffers of the
        model hold; with such values it is not remembered.
        """
        key = examples, generator
        if buffers is None and key in self.cache:
            return self.cache[key]
        found = self._as_drawn(examples, Conditions(generator, buffers=buffers))
        if buffers is None:
            self.cache[key] = found
        return found

    def _as_drawn(self, examples: Indices, conditions: Conditions) -> LossAndGradient:
        """The loss and gradient under these conditions, with the draws of the examples if they are
        given: what ranks that read the same draw is averaged.
        """
        table = self.draws
        if table is None:
            return self._computed(examples, conditions)
        if parts := table.parts_of(examples):
            draws = [(1 / len(parts), examples, table.of_part(part)) for part in parts]
        else:
            groups = table.groups(examples)
            draws = [
                (self.weight_of(len(group), len(examples)), group, table.draws_for(group, owner))
                for owner, group in groups
            ]
        found = [
            (weight, self._computed(some, replace(conditions, draws=tuple(drawn), generator=b"")))
            for weight, some, drawn in draws
        ]
        loss = sum(weight * one.loss for weight, one in found)
        gradient = torch.stack([weight * one.gradient for weight, one in found]).sum(0)
        return LossAndGradient(loss, gradient, True)

    def weight_of(self, some: int, examples: int) -> float:
        """The weight of the gradient of some of these examples in the gradient of all."""
        return 1.0 if self.adds_up or some == examples else some / examples

    def with_draws(self, examples: Indices, draws: Sequence[Draw]) -> LossAndGradient:
        """The loss and gradient of these examples, for which this is drawn."""
        return self._computed(examples, Conditions(draws=tuple(draws)))

    def _computed(self, examples: Indices, conditions: Conditions) -> LossAndGradient:
        """The loss and gradient, computed now. That may be while a report is printed."""
        setting, sample = self.setting, self.parameters.sample
        with (
            self.time.gradient(len(examples)),
            warnings.catch_warnings(),
            threads_for(self.parameters.total),
            without_planted_faults(),
        ):
            warnings.simplefilter("ignore")  # a single example may be too few for the loss
            try:
                loss, gradients, drew, terms = loss_and_gradient_of(
                    setting.case,
                    take(setting.batch, examples, setting.case.batch_dims),
                    setting.earlier_batches,
                    setting.training,
                    conditions,
                    setting.computed_in,
                )
            except BadCase:
                return LossAndGradient(float("nan"), torch.full_like(self.expected, torch.nan))
        compared = {name: value for name, value in gradients.items() if name in sample.sizes}
        return LossAndGradient(loss, setting.scale * sample.of(compared), drew, terms)


OTHER_SEED = 7_919
"""Added to a seed, it gives the seed of other random numbers."""


@dataclass(frozen=True)
class Conditions:
    """What a forward pass finds beside its examples.

    ``generator``: the state that torch's generator gets before it; empty means the usual state.
    ``other_numbers``: let all generators draw others than usual. ``buffers``: what the model's
    buffers hold before the last forward pass, if it is not what the earlier ones have left.
    ``draws``: the random numbers that everything draws; the loss and gradient are NaN if it draws
    others. ``only_term``: all other terms of the loss get no gradient. ``untied``: each place in
    which the model has a weight has one of its own, and the first one is asked for its gradient.
    """

    generator: bytes = b""
    other_numbers: bool = False
    buffers: Mapping[str, Tensor] | None = None
    draws: tuple[Draw, ...] | None = None
    only_term: int | None = None
    untied: bool = False


USUAL = Conditions()


def _states_of_generators() -> tuple[object, ...]:
    numpys: Any = np.random.get_state()
    torchs = torch.get_rng_state().numpy().tobytes()
    return torchs, np.asarray(numpys[1]).tobytes(), numpys[2:], random.getstate()


def loss_and_gradient_of(
    case: Case,
    batch: Any,
    earlier_batches: Sequence[Any] = (),
    training: Training | None = None,
    conditions: Conditions = USUAL,
    computed_in: torch.dtype | None = torch.float64,
) -> tuple[float, dict[str, Tensor | None], bool, int]:
    """The loss of ``batch`` alone, its gradient by parameter name, as float64 numbers, whether a
    forward pass drew numbers from a generator of torch, numpy or random, and the number of the
    loss's terms.

    The weights are those that ``training`` on the ``earlier_batches`` leaves. ``computed_in``: the
    dtype of model and batch; None for the case's. Raises BadCase as the reference does, for
    instance if the loss needs more examples.
    """
    loss, left, drew, terms = loss_of_the_case(case), len(earlier_batches), False, 1

    def with_generators(model: nn.Module, batch: Any) -> Any:
        nonlocal left, drew, terms
        if conditions.buffers and not left:
            _fill_buffers(model, conditions.buffers)
        left -= 1
        if conditions.generator:
            state = torch.frombuffer(bytearray(conditions.generator), dtype=torch.uint8)
            torch.set_rng_state(state)
        if conditions.other_numbers:
            seed = torch.initial_seed() + OTHER_SEED
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
        before = _states_of_generators()
        value = loss(model, batch)
        drew |= before != _states_of_generators()
        if conditions.only_term is not None and left < 0:
            terms = _keep_term(value, conditions.only_term)
        return value

    batches = [in_dtype(one, computed_in) for one in (*earlier_batches, batch)]
    model, replay = build_model(case).to(computed_in), DrawReplay(conditions.draws or ())
    if conditions.untied:
        untie(model)
    with nullcontext() if conditions.draws is None else replay.watching():
        gradients, losses = train(
            case, model, batches, "gradients", training or Training(), with_generators
        )
    of_last = {name: one for (step, name), one in gradients.items() if step == len(batches) - 1}
    if conditions.draws is not None and not replay.complete:
        missing = {name: torch.full_like(one, torch.nan) for name, one in model.named_parameters()}
        return float("nan"), {**missing}, drew, terms
    doubles = {name: None if one is None else one.double() for name, one in of_last.items()}
    return losses[-1], doubles, drew, terms


MOST_TERMS = 5


def _keep_term(loss: Tensor, number: int) -> int:
    """Let only this one of the terms that a loss is the sum of have a gradient. Returns how many
    terms there are.
    """
    waiting, terms = [loss.grad_fn] if loss.grad_fn else [], dict[Any, None]()
    while waiting:
        node = waiting.pop(0)
        inputs = [one for one, _ in node.next_functions if one is not None]
        is_multiple = len(inputs) == 1 and node.name().startswith(MULTIPLES)
        if is_multiple or node.name().startswith(SUMS):
            waiting += inputs
        else:
            terms[node] = None
    for place, term in enumerate(terms):
        if place != number:
            term.register_prehook(
                lambda given: tuple(one and torch.zeros_like(one) for one in given)
            )
    return len(terms)


SUMS = ("AddBackward", "SubBackward")
MULTIPLES = ("MulBackward", "DivBackward", "NegBackward")
"""The operations that make a loss of its terms, as autograd names them."""


def _fill_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Let the buffers of the model hold these values. Those of another shape are left alone."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in values and values[name].shape == buffer.shape:
                buffer.copy_(values[name])


PartsByRank = tuple[tuple[Indices, ...], ...]
"""For every rank of the layout, the examples of each of its micro-batches."""


@dataclass(frozen=True)
class BatchParts:
    """Each part is a micro-batch. Every rank of the layout averages the gradients of its parts.

    ``by_rank`` is None where the parts are not known.
    """

    by_rank: PartsByRank | None
    examples: ExampleGradients

    @property
    def count(self) -> int:
        """The number of parts on all ranks; if they are not known, the number of ranks."""
        if self.by_rank is None:
            return self.examples.setting.world_size
        return sum(map(len, self.by_rank))

    @property
    def micro_batches_per_rank(self) -> int | None:
        """The number of micro-batches of each rank; None if it is not the same on all ranks."""
        counts = {len(parts) for parts in self.by_rank or ()}
        return counts.pop() if len(counts) == 1 else None

    @property
    def examples_by_rank(self) -> list[Indices]:
        """For every rank, the examples of all its parts; empty where the parts are not known."""
        return [tuple(index for part in parts for index in part) for parts in self.by_rank or ()]

    @property
    def distinct(self) -> tuple[Indices, ...]:
        """All parts; one that several ranks compute together comes once."""
        return tuple(dict.fromkeys(part for parts in self.by_rank or () for part in parts))

    def contributions(self) -> Tensor | None:
        """The mean gradient of each rank's parts, shape (world size, elements); None if unknown."""
        if self.by_rank is None:
            return None
        return torch.stack([torch.stack(self._gradients(parts)).mean(0) for parts in self.by_rank])

    def total(self) -> Tensor | None:
        """The sum of the gradients of all parts, shape (elements,); None if they are unknown."""
        if self.by_rank is None:
            return None
        return torch.stack(self._gradients(self.distinct)).sum(0)

    @cached_property
    def add_up_to_the_big_batch(self) -> bool:
        """True if the big batch's gradient is the sum of the parts' gradients.

        False if only one part has a gradient: the big batch may then be their mean just as well.
        """
        total = self.total()
        if total is None:
            return False
        several = sum(bool(one.any()) for one in self._gradients(self.distinct)) > 1
        return several and nearly_equal(total, self.examples.expected)

    def _gradients(self, parts: tuple[Indices, ...]) -> list[Tensor]:
        return [self.examples.gradient(part) for part in parts]


def without_ranks(case: Case) -> Case:
    """The case as one device sees it, which is the same for many layouts and shards.

    Layout and shards change only the batch of a catalogue case: its size and, where the last shard
    is padded, its targets.
    """
    if case.shards == "no_valid_token":
        return case
    return replace(case, layout="1x1", shards="equal", examples=case.catalogue_examples)


@lru_cache(maxsize=256)
def catalogue_cache(
    case: Case, steps: Steps, step: int, training: Training, scale: float
) -> GradientCache:
    """Shared by the views of one catalogue case, since many strategies ask for the same parts."""
    return {}


@dataclass(frozen=True)
class ParameterElements:
    """All parameters, flattened and joined to one vector of shape (elements,).

    If the model is too large, ``sample`` keeps only every n-th element of each parameter.
    """

    sample: ElementSample[str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sample.sizes)

    @property
    def total(self) -> int:
        """The number of elements of all parameters, including those outside the sample."""
        return self.total_of(self.names)

    def total_of(self, names: Iterable[str]) -> int:
        """The number of elements of these parameters, including those outside the sample."""
        return sum(self.sample.sizes[name] for name in names)

    @cached_property
    def places(self) -> dict[str, slice]:
        """Parameter -> its place in a vector."""
        places, begin = {}, 0
        for name in self.names:
            end = begin + self.sample.size(name)
            places[name] = slice(begin, end)
            begin = end
        return places

    def positions_of(self, names: Iterable[str]) -> Tensor:
        """The positions of these parameters' elements in a vector."""
        places = [self.places[name] for name in names]
        return torch.cat([torch.arange(place.start, place.stop) for place in places])

    def combined(self, inside: Tensor, outside: Tensor, names: frozenset[str]) -> Tensor:
        """The values of ``inside`` for these parameters, and of ``outside`` for all others."""
        combined = outside.clone()
        for name in names & self.places.keys():
            combined[..., self.places[name]] = inside[..., self.places[name]]
        return combined


# Records the operations of the loss of the case, of the big batch and of parts of it.


def operations_of_the_loss(
    setting: Setting, parts: Sequence[Indices], time: TimeLeft
) -> list[Operations] | None:
    """The operations of the loss of the case, and of its backward pass, in float64, on each of
    these parts of the big batch.

    The last of several steps is recorded. None if a loss cannot be computed or is too long.
    """
    found = []
    for part in parts:
        with time.gradient(len(part)):
            operations = _operations(setting, part)
        if operations is None or not operations.complete:
            return None
        found.append(operations)
    return found


def _operations(setting: Setting, part: Indices) -> Operations | None:
    loss = loss_of_the_case(setting.case)
    batches = [
        in_dtype(one, torch.float64)
        for one in (*setting.earlier_batches, take(setting.batch, part, setting.case.batch_dims))
    ]
    log = OperationLog()
    number = 0

    def logged(model: nn.Module, batch: Any) -> Tensor:
        nonlocal number
        number += 1
        if number == len(batches):
            running.enter_context(log)
        value: Tensor = loss(model, batch)
        return value

    with warnings.catch_warnings(), without_planted_faults(), ExitStack() as running:
        warnings.simplefilter("ignore")
        try:
            model = build_model(setting.case).double()
            train(setting.case, model, batches, "gradients", setting.training, logged)
        except BadCase:
            return None
    return log.found({})
