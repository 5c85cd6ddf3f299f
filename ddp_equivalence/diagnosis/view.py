"""The view of one step that every hypothesis gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.diagnosis.batch_parts import BatchParts, PartsByRank
from ddp_equivalence.diagnosis.example_gradients import ExampleGradients, GradientCache
from ddp_equivalence.diagnosis.local_gradients import (
    MicroBatchGradients,
    observed_micro_batches,
    possible_micro_batches,
    sums_over_micro_batches,
)
from ddp_equivalence.diagnosis.measured_gradients import MeasuredGradients
from ddp_equivalence.diagnosis.observed_step import ObservedStep
from ddp_equivalence.diagnosis.parameter_elements import ParameterElements
from ddp_equivalence.diagnosis.setting import Setting
from ddp_equivalence.diagnosis.time_left import TimeLeft


def _not_known() -> None:
    return None


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
    factor_on_one_rank: Callable[[], float | None] = _not_known

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
        return observed_micro_batches(self.parts, self.observed)

    @cached_property
    def micro_batch_gradients(self) -> tuple[MicroBatchGradients, ...]:
        """What each micro-batch may have added to its rank's local gradient: all candidates."""
        return possible_micro_batches(self.parts, self.observed, self.observed_gradients)

    @cached_property
    def local_gradients(self) -> tuple[Tensor, ...]:
        """What each rank may have computed before any reduction: all candidates, the likeliest
        first, each of shape (world size, elements).
        """
        return sums_over_micro_batches(self.micro_batch_gradients)

    @cached_property
    def weights_of_ranks(self) -> Tensor | None:
        """The weight of each rank's local gradient in what each rank holds.

        Shape (reporting ranks, world size); None if the weights cannot be determined.
        """
        if not self.local_gradients:
            return None
        return self.measured.weights_of(self.local_gradients[0])

    def averages_of_node_sums(self) -> list[Tensor]:
        """The local gradients, added up inside each node and averaged over the nodes.

        Empty unless the strategy reduces like this. A plain mean or sum over all ranks is not
        among these candidates, because it is predicted from the parts of the batch.
        """
        layout = self.setting.layout
        if not self.setting.sums_in_nodes or layout.nodes == layout.world_size:
            return []
        return [local.sum(0) / layout.nodes for local in self.local_gradients]

    def only(self, names: Sequence[str]) -> View:
        """The view of these parameters alone."""
        examples = self.examples.only(names)
        positions = self.parameters.positions_of(names)
        return View(
            setting=self.setting,
            parameters=examples.parameters,
            examples=examples,
            parts=BatchParts(self.parts.by_rank, examples),
            measured=MeasuredGradients(
                self.measured.by_rank[:, positions],
                self.measured.differing.intersection(names),
                examples.expected,
                examples.parameters,
            ),
            observed=self.observed.only(positions),
            factor_on_one_rank=self.factor_on_one_rank,
        )
