"""The gradient of any examples of the big batch, computed on one device without the others."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.diagnosis.draw_table import DrawTable, Part
from ddp_equivalence.diagnosis.loss_and_gradient import Drawn, loss_and_gradient_of
from ddp_equivalence.diagnosis.parameter_elements import ParameterElements
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import Setting
from ddp_equivalence.diagnosis.time_left import TimeLeft
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.random_draws import Draw
from ddp_equivalence.ranks.threads import threads_for
from ddp_equivalence.strategies.sharded_batch import Indices


@dataclass(frozen=True)
class LossAndGradient:
    """The loss of some examples, and its gradient, shape (elements,).

    ``drew``: the forward pass drew random numbers.
    """

    loss: float
    gradient: Tensor
    drew: bool = False


GradientCache = dict[tuple[Indices, bytes], LossAndGradient]
"""(examples, state of torch's generator) -> the loss and gradient that were computed for them."""


@dataclass(frozen=True)
class ExampleGradients:
    """Computes the loss and the gradient of any examples, in float64, and remembers them.

    ``expected``: the gradient of the big batch, shape (elements,). ``earlier_expected``: the
    gradients of the earlier steps' big batches. ``time``: counts what computing them takes; a
    gradient that there is no time for raises OutOfTime. ``whole``: if these are the gradients of
    some parameters only, the gradients of all, which are computed once for every part.
    ``draws``: the random numbers that are drawn for every example, if they are given.
    ``adds_up``: the gradient of the big batch is then the sum of those of parts, not their mean.
    """

    setting: Setting
    parameters: ParameterElements
    expected: Tensor
    earlier_expected: tuple[Tensor, ...] = ()
    cache: GradientCache = field(default_factory=dict)
    time: TimeLeft = field(default_factory=TimeLeft)
    whole: ExampleGradients | None = None
    draws: DrawTable | None = None
    adds_up: bool = False

    def only(self, names: Sequence[str]) -> ExampleGradients:
        """The gradients of these parameters alone."""
        positions = self.parameters.positions_of(names)
        return replace(
            self,
            parameters=self.parameters.only(names),
            expected=self.expected[positions],
            earlier_expected=tuple(one[positions] for one in self.earlier_expected),
            cache={},
            whole=self,
        )

    def gradient(self, examples: Indices) -> Tensor:
        """The gradient of these examples alone, shape (elements,); NaN if they have no loss."""
        return self.compute(examples).gradient

    def loss(self, examples: Indices) -> float:
        """The loss of these examples alone; NaN if they have none."""
        return self.compute(examples).loss

    @property
    def big_batch_loss(self) -> float:
        return self.loss(tuple(range(self.setting.example_count)))

    @cached_property
    def draws_random_numbers(self) -> bool:
        """True if the big batch has another gradient with other random numbers.

        Raises OutOfTime.
        """
        if self.whole is not None:
            return self.whole.draws_random_numbers
        if self.draws is not None:
            return False  # they are given
        everything = tuple(range(self.setting.example_count))
        known = [one for (part, _), one in self.cache.items() if part and one.loss == one.loss]
        if not (known or [self.compute(everything)])[0].drew:
            return False
        with self._computing(everything):
            other = self._compute(everything, b"", other_numbers=True)
        return not nearly_equal(other.gradient, self.compute(everything).gradient)

    def data_independent_gradient(self) -> Tensor | None:
        """The gradient of the loss's terms that do not depend on the data; None if it has none."""
        gradient = self.gradient(())
        return gradient if bool(gradient.isfinite().all()) and bool(gradient.any()) else None

    def compute(self, examples: Indices, generator: bytes = b"") -> LossAndGradient:
        """The loss and gradient of these examples alone.

        ``generator``: the state that torch's generator gets before the forward pass; if it is
        empty, the generator starts from the seed of the step.
        """
        key = examples, generator
        if key not in self.cache and self.whole is not None:
            whole = self.whole.compute(examples, generator)
            positions = self.whole.parameters.positions_of(self.parameters.names)
            self.cache[key] = LossAndGradient(whole.loss, whole.gradient[positions], whole.drew)
        if key not in self.cache:
            with self._computing(examples):
                self.cache[key] = self._compute(examples, generator)
        return self.cache[key]

    def with_buffers(
        self, examples: Indices, generator: bytes, buffers: Mapping[str, Tensor]
    ) -> LossAndGradient:
        """The same with these values in the buffers of the model. It is not remembered."""
        if self.whole is not None:
            whole = self.whole.with_buffers(examples, generator, buffers)
            positions = self.whole.parameters.positions_of(self.parameters.names)
            return LossAndGradient(whole.loss, whole.gradient[positions], whole.drew)
        with self._computing(examples):
            return self._compute(examples, generator, buffers=buffers)

    @contextmanager
    def _computing(self, examples: Indices) -> Iterator[None]:
        """The block computes a gradient. It may do so while a report is printed."""
        with (
            self.time.gradient(len(examples)),
            warnings.catch_warnings(),
            threads_for(self.parameters.total),
            without_planted_faults(),
        ):
            warnings.simplefilter("ignore")  # a single example may be too few for the loss
            yield

    def _compute(
        self,
        examples: Indices,
        generator: bytes,
        other_numbers: bool = False,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> LossAndGradient:
        if self.draws is None:
            return self._of_draws(examples, generator, other_numbers, buffers)
        if parts := self.draws.parts_of(examples):  # ranks that read the same draw other numbers
            of_parts = [
                self._of_draws(examples, b"", False, buffers, tuple(self.draws.of_part(part)))
                for part in parts
            ]
            return LossAndGradient(
                sum(one.loss for one in of_parts) / len(of_parts),
                torch.stack([one.gradient for one in of_parts]).mean(0),
                True,
            )
        groups = self.draws.groups(examples)
        of_groups = [
            self._of_draws(
                of_group, b"", False, buffers, tuple(self.draws.draws_for(of_group, owner))
            )
            for owner, of_group in groups
        ]
        if len(groups) == 1:
            return of_groups[0]
        weights = [self.weight_of(len(of_group), len(examples)) for _, of_group in groups]
        pairs = list(zip(weights, of_groups, strict=True))
        return LossAndGradient(
            sum(weight * one.loss for weight, one in pairs),
            torch.stack([weight * one.gradient for weight, one in pairs]).sum(0),
            True,
        )

    def weight_of(self, some: int, examples: int) -> float:
        """The weight of the gradient of some of these examples in the gradient of all."""
        return 1.0 if self.adds_up else some / examples

    def drawn_for(self, examples: Indices) -> list[Draw] | None:
        """The random numbers for these examples; None if none are given, or not to all at once."""
        groups = [] if self.draws is None else self.draws.groups(examples)
        if self.draws is None or len(groups) != 1:
            return None
        return self.draws.draws_for(examples, groups[0][0])

    def of_part(self, part: Part) -> LossAndGradient:
        """The loss and gradient of a part, with the random numbers that were drawn for it."""
        assert self.draws is not None
        with self._computing(part.examples):
            return self._of_draws(part.examples, b"", False, None, tuple(self.draws.of_part(part)))

    def as_if_drawn_by(self, owner: int, examples: Indices) -> LossAndGradient:
        """The same of any examples, with the numbers of one part where examples share them."""
        assert self.draws is not None
        with self._computing(examples):
            draws = tuple(self.draws.draws_for(examples, owner))
            return self._of_draws(examples, b"", False, None, draws)

    def _of_draws(
        self,
        examples: Indices,
        generator: bytes,
        other_numbers: bool,
        buffers: Mapping[str, Tensor] | None,
        draws: tuple[Draw, ...] | None = None,
    ) -> LossAndGradient:
        setting, sample, drawn = self.setting, self.parameters.sample, Drawn()
        try:
            loss, gradients = loss_and_gradient_of(
                setting.case,
                take(setting.batch, examples, setting.case.batch_dims),
                setting.earlier_batches,
                setting.training,
                generator,
                other_numbers,
                drawn,
                buffers,
                draws,
                setting.computed_in,
            )
        except BadCase:
            return LossAndGradient(float("nan"), torch.full_like(self.expected, torch.nan))
        compared = {name: value for name, value in gradients.items() if name in sample.sizes}
        return LossAndGradient(loss, setting.scale * sample.of(compared), drawn.anything)
