"""The analysis of one check: whatever costs time to know, computed when it is asked for."""

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
from ddp_equivalence.case.steps import GradientKey, Steps
from ddp_equivalence.comparison.comparison import ParameterComparison
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.comparison.expected import Expected
from ddp_equivalence.comparison.tolerance import Noise
from ddp_equivalence.diagnosis.diagnose import Finding, NearestFault, diagnose, nearest_fault
from ddp_equivalence.diagnosis.divisor_candidates import counts
from ddp_equivalence.diagnosis.divisors import WhoseMean, whose_mean
from ddp_equivalence.diagnosis.localisation import Clues, clues, left_over_of_weights
from ddp_equivalence.diagnosis.measured_view import first_wrong_step, repeats, taken_apart
from ddp_equivalence.diagnosis.shares import Shares, shares_of
from ddp_equivalence.diagnosis.view import Piece, View
from ddp_equivalence.measurement.measure import Measurement
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.strategies.sharded_batch import Indices, sharded_batches

MAX_ELEMENTS = 2_000_000
"""Ranks x elements that are kept to take a difference apart; of more, a selection is."""

MAX_SELECTED = 200_000
"""Ranks x elements of that selection: enough to tell causes apart, and little beside the model."""


class Analysis:
    """Everything about a check that costs time to know: computed when it is asked for, and once.

    ``check`` makes it from the request and the reference, and adds what was ``measured`` on the
    ranks and, where something differs, what was ``observed`` in a second run. A check that is
    plainly the same asks for nothing.
    """

    def __init__(self, request: Request, expected: Expected) -> None:
        self._request = request
        self._expected = expected
        self.measurement: Measurement | None = None
        self.observed: Mapping[int, Observation] = {}

    @cached_property
    def sample(self) -> ElementSample[GradientKey]:
        """The elements that are kept of the gradients that the ranks send."""
        sizes = {
            key: value.numel()
            for key, value in self._expected.reference.expected.items()
            if value is not None
        }
        world_size = self._request.case.ranks.world_size
        if sum(sizes.values()) * world_size <= MAX_ELEMENTS:
            return ElementSample.at_most(MAX_ELEMENTS, sizes)
        return ElementSample.at_most(MAX_SELECTED // world_size, sizes)

    def sample_of_step(self, step: int) -> ElementSample[str]:
        """The elements that are kept of one step's gradients, by parameter name."""
        names = [name for of_step, name in self.sample.sizes if of_step == step]
        return ElementSample(
            {name: self.sample.sizes[step, name] for name in names},
            {name: self.sample.stride[step, name] for name in names},
        )

    @cached_property
    def nearest_fault(self) -> NearestFault | None:
        """The fault that would be hardest to see; None where the model is too large to tell."""
        view = self._view_of_step(0) if self.sample.is_whole else None
        return None if view is None else nearest_fault(view)

    def floor_of(self, parameter: ParameterComparison) -> float | None:
        """How far rounding alone moves this parameter on one device, relative to its norm.

        None where the model is too large to measure it for a report alone.
        """
        if not self.sample.is_whole:
            return None
        noise = self._expected.rounding.noise.get(parameter.key, Noise())
        return noise.norm / parameter.norm if parameter.norm > 0 else 0.0

    @cached_property
    def repeated(self) -> bool | None:
        """True if the second run left the same bits on every rank; None if that is not known."""
        if self.measurement is None or not self.sample.is_whole:
            return None
        return repeats(self.measurement.measured, self.observed)

    @cached_property
    def view(self) -> View | None:
        """The first step that differs, as hypotheses see it; None if nothing can be fitted."""
        if self.measurement is None or self.why_no_view:
            return None
        step = self.first_wrong_step
        view = self._view_of_step(step)
        if view is None:
            return None
        return taken_apart(view, self.measurement, self.observed, step, self.repeated is False)

    @cached_property
    def why_no_view(self) -> str:
        """Why no hypothesis can be fitted to the difference; "" if one can."""
        if self.measurement is not None and self.measurement.comparison.structure:
            return "gradients that are missing or of another shape cannot be fitted"
        if self._later_weights_are_wrong:
            return "after the first step the weights of a wrong run are its own"
        return ""

    @cached_property
    def first_wrong_step(self) -> int:
        """The first step that differs. Updates are compared after the last one."""
        assert self.measurement is not None
        if self._request.compare == "update":
            return self._request.step_count - 1
        return first_wrong_step(self.measurement.comparison, self._request.step_count)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """All explanations of the difference, best first."""
        if self.view is None or self.measurement is None:
            return ()
        return diagnose(self.view, self.measurement.comparison)

    @cached_property
    def shares(self) -> Shares | str:
        """How often each example entered what each rank holds, or why that is not known."""
        return self.why_no_view if self.view is None else shares_of(self.view)

    @cached_property
    def divisors(self) -> WhoseMean | None:
        """The numbers that the loss, the ranks and the big batch divide by, if they are plain."""
        return None if self.view is None else whose_mean(self.view)

    @cached_property
    def localisation(self) -> Clues:
        """In which half of the step, and in which module, the difference lies."""
        if self.measurement is None:
            return Clues()
        if self.view is None:
            if self.measurement.comparison.structure or not self._later_weights_are_wrong:
                return Clues()
            return Clues(weights=self._left_over_of_weights())
        named = bool(self.findings) and self.findings[0].accepted
        return clues(self.view, self.measurement.comparison, named=named)

    @property
    def _later_weights_are_wrong(self) -> bool:
        return self._request.compare == "update" and self._request.step_count > 1

    def _view_of_step(self, step: int) -> View | None:
        """What hypotheses may look at in one step; None where there is nothing to look at."""
        request, case, reference = self._request, self._request.case, self._expected.reference
        if self._later_weights_are_wrong:
            return None
        model = build_model(case)
        sample = self.sample_of_step(0 if request.compare == "update" else step)
        if not sample.sizes:
            return None
        batches = build_batches(case, request.steps)
        examples = count_examples(batches[step])
        dealt = None
        if case.shards != OWN:
            dealt = split(case.shards, examples, case.ranks.world_size).indices
        parts: tuple[tuple[Indices, ...], ...] | None = None
        if dealt is not None:
            parts = tuple((indices,) for indices in dealt)
        if request.strategy is not None and case.is_catalogue:
            parts = request.strategy.parts_by_rank(sharded_batches(case, request.steps)[step])
        return View(
            case=case,
            layout=case.ranks,
            expected=self._expected_of_step(sample, step),
            shapes={
                name: tuple(p.shape) for name, p in model.named_parameters() if name in sample.sizes
            },
            selection=sample,
            ranks=tuple(range(request.processes.world_size)),
            dealt=dealt,
            parts=parts,
            batch=batches[step],
            examples=examples,
            before=tuple(batches[:step]),
            previous=tuple(self._expected_of_step(sample, earlier) for earlier in range(step)),
            lr=request.lr,
            has_batch_norm=_has(model, nn.modules.batchnorm._BatchNorm),
            has_dropout=_has(model, nn.modules.dropout._DropoutNd)
            and self._expected.rounding.order_matters,
            dtype=reference.lowest_dtype,
            seed=step_seed(case, step),
            counts=counts(batches[step]),
            batch_coupled=_coupled(case),
            sums_in_nodes=request.strategy is not None and request.strategy.sums_in_nodes,
            scale=-request.lr if request.compare == "update" else 1.0,
            on_cpu=request.lane.device_type == "cpu",
            known=self._known(step) if sample.is_whole else {},
        )

    def _left_over_of_weights(self) -> Mapping[str, float]:
        """Of an update over several steps: how many times the first weights are left over."""
        assert self.measurement is not None
        sample = self.sample_of_step(0)
        measured = {name: one for (_, name), one in self.measurement.measured[0].items()}
        return left_over_of_weights(
            self._request.case,
            sample,
            self._expected_of_step(sample, 0),
            sample.joined({name: one for name, one in measured.items() if name in sample.sizes}),
        )

    def _expected_of_step(self, sample: ElementSample[str], step: int) -> Tensor:
        step = 0 if self._request.compare == "update" else step
        expected = self._expected.reference.expected
        return sample.of({name: expected[step, name] for name in sample.sizes})

    def _known(self, step: int) -> dict[tuple[Indices, bytes], Piece]:
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
def _known_pieces(
    case: Case, steps: Steps, step: int, lr: float, scale: float
) -> dict[tuple[Indices, bytes], Piece]:
    """Filled by the views of one catalogue case: strategies meet the same parts of it again."""
    return {}
