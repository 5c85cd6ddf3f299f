"""What lies around a measured gradient: predictions of every fault, computed when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from torch import Tensor, nn

from ddp_equivalence.case.batch import count_examples
from ddp_equivalence.case.build import build_batches, build_model
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.random_state import step_seed
from ddp_equivalence.case.shards import OWN, split
from ddp_equivalence.case.steps import Steps, in_step
from ddp_equivalence.comparison.comparison import ParameterComparison
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.comparison.tolerance import Noise
from ddp_equivalence.diagnosis.divisor_candidates import distinct_divisors
from ddp_equivalence.diagnosis.example_gradients import GradientCache
from ddp_equivalence.diagnosis.localisation import multiples_of_weights
from ddp_equivalence.diagnosis.nearest_fault import NearestFault, nearest_fault
from ddp_equivalence.diagnosis.setting import Setting
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.reference import Reference
from ddp_equivalence.strategies.sharded_batch import Indices, facts_of

MAX_ELEMENTS = 2_000_000
"""Ranks x elements that are kept to take a difference apart; of more, a selection is."""

MAX_SELECTED = 200_000
"""Ranks x elements of that selection: enough to tell causes apart, and little beside the model."""


class Surroundings:
    """Of one request and its reference; a check that is plainly the same never asks."""

    def __init__(self, request: Request, reference: Reference) -> None:
        self._request, self._reference = request, reference

    @cached_property
    def selection(self) -> ElementSample:
        """The elements that are kept of what the ranks send: of all steps, by name."""
        sizes = {
            name: value.numel()
            for name, value in self._reference.expected.items()
            if value is not None
        }
        world_size = self._request.case.ranks.world_size
        if sum(sizes.values()) * world_size <= MAX_ELEMENTS:
            return ElementSample.at_most(MAX_ELEMENTS, sizes)
        return ElementSample.at_most(MAX_SELECTED // world_size, sizes)

    @cached_property
    def own_selection(self) -> ElementSample:
        """The same of one step's gradients."""
        request = self._request
        names = [name for name, _ in build_model(request.case).named_parameters()]
        full = {name: in_step(name, 0, request.step_count) for name in names}
        if request.compare == "update":
            full = {name: name for name in names}
        known = {name: one for name, one in full.items() if one in self.selection.sizes}
        return ElementSample(
            {name: self.selection.sizes[one] for name, one in known.items()},
            {name: self.selection.stride[one] for name, one in known.items()},
        )

    @cached_property
    def view(self) -> View | None:
        """What hypotheses may look at in the first step."""
        return self.view_of_step(0)

    @cached_property
    def nearest(self) -> NearestFault | None:
        """The fault that would be hardest to see; None where the model is too large to tell."""
        if not self.selection.is_whole or self.view is None:
            return None
        return nearest_fault(self.view)

    def floor_of(self, one: ParameterComparison) -> float | None:
        """What rounding alone does to this parameter on one device, relative to its norm.

        None where the model is too large to measure it for a report alone.
        """
        if not self.selection.is_whole:
            return None
        noise = self._reference.rounding.noise.get(one.name, Noise())
        return noise.norm / one.norm if one.norm > 0 else 0.0

    def view_of_step(self, step: int) -> View | None:
        """What hypotheses may look at in one step; None where there is nothing to look at."""
        request, case, reference = self._request, self._request.case, self._reference
        if request.compare == "update" and request.step_count > 1:
            return None  # after the first step the weights of a wrong run are its own
        model = build_model(case)
        count = request.step_count
        named = {
            name: in_step(name, step, count)
            for name, _ in model.named_parameters()
            if reference.expected.get(in_step(name, step, count)) is not None
        }
        if not named:
            return None
        selection = ElementSample(
            {name: self.selection.sizes[full] for name, full in named.items()},
            {name: self.selection.stride[full] for name, full in named.items()},
        )
        batches = build_batches(case, request.steps)
        examples = count_examples(batches[step])
        dealt = None
        if case.shards != OWN:
            dealt = split(case.shards, examples, case.ranks.world_size).indices
        parts: tuple[tuple[Indices, ...], ...] | None = None
        if dealt is not None:
            parts = tuple((indices,) for indices in dealt)
        if request.strategy is not None and case.is_catalogue:
            parts = request.strategy.contributions(facts_of(case, request.steps)[step])
        setting = Setting(
            case=case,
            layout=case.ranks,
            batch=batches[step],
            example_count=examples,
            earlier_batches=tuple(batches[:step]),
            shards=dealt,
            reporting_ranks=tuple(range(request.processes.world_size)),
            lr=request.lr,
            has_batch_norm=_has(model, nn.modules.batchnorm._BatchNorm),
            has_dropout=_has(model, nn.modules.dropout._DropoutNd)
            and reference.rounding.order_matters,
            dtype=reference.dtype,
            seed=step_seed(case, step),
            batch_coupled=_coupled(case),
            sums_in_nodes=request.strategy is not None and request.strategy.sums_in_nodes,
            scale=-request.lr if request.compare == "update" else 1.0,
            draws_on_cpu=request.lane.device_type == "cpu",
            divisor_candidates=distinct_divisors(batches[step]),
        )
        return View.before_the_run(
            setting,
            selection,
            self._expected(selection, step),
            tuple(self._expected(selection, earlier) for earlier in range(step)),
            parts,
            self._known(step) if selection.is_whole else {},
        )

    def left_over_of_weights(
        self, measured: Mapping[int, Mapping[str, Tensor | None]]
    ) -> Mapping[str, float]:
        """Of an update over several steps: how many times the first weights are left over."""
        selection, reference = self.selection, self._reference
        found = {name: one for name, one in measured[0].items() if one is not None}
        return multiples_of_weights(
            self._request.case,
            selection,
            selection.of(reference.expected),
            selection.joined(found),
        )

    def _expected(self, selection: ElementSample, step: int) -> Tensor:
        count = self._request.step_count
        found = self._reference.expected
        return selection.of({name: found[in_step(name, step, count)] for name in selection.sizes})

    def _known(self, step: int) -> GradientCache:
        request = self._request
        if not request.case.is_catalogue:
            return {}
        scale = -request.lr if request.compare == "update" else 1.0
        return _known_pieces(without_ranks(request.case), request.steps, step, request.lr, scale)


def without_ranks(case: Case) -> Case:
    """The case as one device sees it. Of a catalogue case only the batch depends on layout and
    shards: through its size and, where the last shard is padded, its targets.
    """
    if case.shards == "no_valid_token":
        return case
    return replace(case, layout="1x1", shards="equal", examples=case.catalogue_examples)


def _coupled(case: Case) -> str | None:
    loss = LOSSES.get(case.loss) if isinstance(case.loss, str) else None
    return getattr(loss, "batch_coupled", None)


def _has(model: nn.Module, kind: Any) -> bool:
    return any(isinstance(module, kind) and module.training for module in model.modules())


@lru_cache(maxsize=256)
def _known_pieces(case: Case, steps: Steps, step: int, lr: float, scale: float) -> GradientCache:
    """Filled by the views of one catalogue case: strategies meet the same parts of it again."""
    return {}
