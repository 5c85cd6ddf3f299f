"""The analysis of one check: what is costly to compute is computed when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.comparison.comparison import ParameterComparison
from ddp_equivalence.comparison.gradients import ElementSample
from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.comparison.tolerance import Noise
from ddp_equivalence.diagnosis.diagnose import Finding, diagnose, seen_at_the_optimizer
from ddp_equivalence.diagnosis.divisors import Divisors, find_divisors
from ddp_equivalence.diagnosis.draws import (
    DrawnView,
    ReferenceDraws,
    drawn_view,
    draws_of_the_big_batch,
    findings_of_drawn,
)
from ddp_equivalence.diagnosis.example_gradients import (
    GradientCache,
    PartsByRank,
    catalogue_cache,
    without_ranks,
)
from ddp_equivalence.diagnosis.hypothesis import why_unpredictable
from ddp_equivalence.diagnosis.localisation import (
    Localisation,
    findings_beside_one_rank,
    localise,
    one_rank_shows_more,
    unless_ranks_differ_by_factors,
)
from ddp_equivalence.diagnosis.repairs.find_repairs import Repairs, find_repairs
from ddp_equivalence.diagnosis.setting import setting_of
from ddp_equivalence.diagnosis.shares import NoShares, Shares, kept_elements, shares_of
from ddp_equivalence.diagnosis.time_left import (
    BY_RANK,
    CAUSES,
    DIVISORS,
    NEAREST,
    WHEREABOUTS,
    TimeLeft,
)
from ddp_equivalence.diagnosis.vacuity import NearestFault, nearest_fault
from ddp_equivalence.diagnosis.view import (
    ObservedStep,
    View,
    first_wrong_step,
    left_same_bits,
    with_measurement,
)
from ddp_equivalence.diagnosis.where import divergence
from ddp_equivalence.diagnosis.where.find_whereabouts import where_without_view
from ddp_equivalence.diagnosis.where.lines_of_divergences import lines_to_edit, with_one_rank
from ddp_equivalence.diagnosis.where.whereabouts import Whereabouts, not_seen
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.measure import Measurement
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.strategies.sharded_batch import sharded_batches


class Analysis:
    """Everything about a check that is costly to compute. Each part is computed once, if asked for.

    If something differs, ``check`` adds the ``measurement`` of the ranks, and what was ``observed``
    in a second run; ``why_not_watched`` says why there was none. Otherwise only the nearest fault
    and the rounding floor can be asked for. ``looks_further``: where no cause was seen happening,
    the step runs on one rank as well, and edited. ``time``: what all of this may take. Each of
    these is set before a property that depends on it is asked for.
    """

    def __init__(self, request: Request, expected: Expected) -> None:
        self.reference = expected.reference
        self._request = request
        self._expected = expected
        self.measurement: Measurement | None = None
        self.observed: Mapping[int, Observation] = {}
        self.why_not_watched = ""
        self.time = TimeLeft()
        self.looks_further = False

    @property
    def lowest_dtype(self) -> torch.dtype:
        """The least precise dtype among the trained parameters."""
        return self.reference.lowest_dtype

    @cached_property
    def sample(self) -> ElementSample[GradientKey]:
        """The elements that are kept of the gradients that the ranks send."""
        return kept_elements(self._expected, self._request.case.ranks.world_size)

    def sample_of_step(self, step: int) -> ElementSample[str]:
        """The elements that are kept of one step's gradients, by parameter name."""
        kept = self.sample.sizes, self.sample.stride
        return ElementSample(*({n: one[s, n] for s, n in one if s == step} for one in kept))

    @cached_property
    def nearest_fault(self) -> NearestFault | None:
        """The fault that would be hardest to see; None where the model is too large to tell."""
        if not self.sample.is_whole:
            return None
        with suppress(BadCase):  # the batch cannot be built a second time
            view = self._view_of_step(0)
            if view is not None:
                return self.time.within(NEAREST, lambda: nearest_fault(view), None)
        return None

    @property
    def micro_batches(self) -> int:
        """In how many micro-batches the big batch was computed."""
        return self._expected.reference.micro_batches.count

    @property
    def start(self) -> str:
        """A digest of the weights with which the reference began; "" if it is to be made anew."""
        return self._expected.start

    def floor_of(
        self, parameter: ParameterComparison, autocast: torch.dtype | None = None
    ) -> float | None:
        """How far rounding alone moves this parameter on one device, relative to its norm.

        ``autocast``: the dtype of the autocast regions that the step enters, if they do anything.
        None if the model is too large to measure this only for a report.
        """
        if not self.sample.is_whole:
            return None
        with without_planted_faults():  # the report may be printed while a fault is planted
            try:
                noise = self._expected.rounding_under(autocast).noise.get(parameter.key, Noise())
            except BadCase:  # the batch cannot be built a second time
                return None
        return noise.norm / parameter.norm if parameter.norm > 0 else 0.0

    @cached_property
    def repeated(self) -> bool | None:
        """True if the second run left the same bits on every rank; None if that is not known."""
        if self.measurement is None or not self.sample.is_whole:
            return None
        return left_same_bits(self.measurement.measured, self.observed)

    @cached_property
    def view(self) -> View | None:
        """The first step that differs, as hypotheses see it; None if nothing can be fitted."""
        return self.drawn.view if self.drawn is not None else self.view_of_own_draws

    @cached_property
    def draws(self) -> ReferenceDraws | None:
        """The random numbers that the big batch draws; None if no other can be given to it."""
        if not (self.sample.is_whole or self._expected.reference.draws):
            return None  # a large model is not built once more to look for other generators
        try:
            view = self._view_of_step(0) if self._request.compare == "gradients" else None
        except BadCase:  # the batch cannot be built a second time
            return None
        return None if view is None else draws_of_the_big_batch(view.setting)

    @cached_property
    def drawn(self) -> DrawnView | None:
        """The view with the random numbers that the ranks drew; None if they are not known."""
        if self.measurement is None or self.view_of_own_draws is None or self.draws is None:
            return None
        return drawn_view(self.view_of_own_draws, self.measurement.comparison, self.draws)

    @cached_property
    def view_of_own_draws(self) -> View | None:
        """The same with the random numbers that the big batch draws by itself."""
        if self.measurement is None or self.why_no_view:
            return None
        step = self.first_wrong_step
        view, other_bits = self._view_of_step(step), self.repeated is False
        seen = view and with_measurement(view, self.measurement, self.observed, step, other_bits)
        return seen and divergence.asking_one_rank(seen, self._request)

    @cached_property
    def _view_without_predictions(self) -> View | None:
        """The first step, with what the ranks were seen to do, where nothing can be predicted:
        gradients are missing in the only step, the reference is a user's own, or what is compared
        is the update that an optimizer made.
        """
        measured, is_update = self.measurement, self._request.compare == "update"
        if measured is None or not self.observed or (self.first_wrong_step and not is_update):
            return None
        if self._is_missing:
            is_alone = self._request.step_count == 1 or self._request.at_each_step
            view = self._view_of_step(0) if is_alone else None
            return view and replace(view, observed=ObservedStep(view.setting, self.observed))
        view = self._built_view(0) if is_update else self._own_reference
        return view and with_measurement(view, measured, self.observed, 0, self.repeated is False)

    @property
    def _is_missing(self) -> bool:
        """True if a rank has no gradient of a parameter, or one of another shape."""
        if self.measurement is None:
            return False
        found = self.measurement.comparison
        every = len(found.ranks)
        return bool(found.structure) or any(len(one.by_rank) < every for one in found.parameters)

    @cached_property
    def _own_reference(self) -> View | None:
        """The first step of a user's own reference, if its gradients are known."""
        is_of_the_user = self._request.training.is_of_the_user and self._request.at_each_step
        return self._built_view(0) if is_of_the_user else None

    @property
    def _follows_the_loss(self) -> bool:
        """True if the first gradients of the user's own reference are those of the case's loss, and
        are the first that differ, so that they can be predicted.
        """
        if self.measurement is None or self.first_wrong_step:
            return False
        return (
            self._own_reference is not None and self._own_reference.examples.give_what_is_expected
        )

    @cached_property
    def why_no_view(self) -> str:
        """Why no hypothesis can be fitted to the difference; "" if one can."""
        if self._is_missing:
            return "gradients that are missing or of another shape cannot be fitted"
        return "" if self._follows_the_loss else why_unpredictable(self._request)

    @cached_property
    def first_wrong_step(self) -> int:
        """The first step that differs; the last step if updates are compared."""
        assert self.measurement is not None
        if self._request.compare == "update":
            return self._request.step_count - 1
        return first_wrong_step(self.measurement.comparison, self._request.step_count)

    @cached_property
    def explanations(self) -> tuple[Finding, ...]:
        """All explanations of the difference from the gradients and the second run, best first."""
        if self.measurement is None:
            return ()
        with self.time.counted(CAUSES):
            if self.drawn is not None:
                return findings_of_drawn(self.drawn, self.measurement.comparison)
            if self.view is None:
                unseen = self._view_without_predictions
                return () if unseen is None else seen_at_the_optimizer(unseen)
            found = diagnose(self.view, self.measurement.comparison)
            return unless_ranks_differ_by_factors(found, self.view)

    @cached_property
    def beside(self) -> divergence.BesideOneRank | None:
        """What the step did on one rank with the whole batch, where that may show more."""
        view = self._view_without_predictions if self.view is None else self.view
        if not self.looks_further or view is None:
            return None
        if self.view is not None and not one_rank_shows_more(_believed(self.explanations)):
            return None
        compute = partial(divergence.beside_one_rank, view, self._request)
        return self.time.within(WHEREABOUTS, compute, None)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """All explanations of the difference, best first."""
        found, view, beside = self.explanations, self.view, self.beside
        if view is None:
            return found
        compute = partial(findings_beside_one_rank, found, view, beside)
        return self.time.within(WHEREABOUTS, compute, found)

    @cached_property
    def repairs(self) -> Repairs:
        """The edits of the step that repair it, where no cause was seen happening."""
        best = _believed(self.findings)
        was_seen = best is not None and bool(best.lines) and not best.is_guess
        if not self.looks_further or self.drawn is not None or was_seen:
            return Repairs()
        return find_repairs(
            self._request,
            self._expected,
            lambda: lines_to_edit(best, self.localisation.whereabouts),
            self.time,
        )

    @cached_property
    def shares(self) -> Shares | NoShares:
        """How often each example entered what each rank holds, or why that is not known."""
        with self.time.counted(BY_RANK):
            return NoShares(self.why_no_view) if self.view is None else shares_of(self.view)

    @cached_property
    def divisors(self) -> Divisors | None:
        """The numbers that ranks' losses, the reduction and the big batch divide by, if known."""
        view = self.view
        if view is None:
            return None
        return self.time.within(DIVISORS, lambda: find_divisors(view), None)

    @cached_property
    def localisation(self) -> Localisation:
        """Where the difference lies, in addition to its cause."""
        if self.measurement is None:
            return Localisation()
        if self.view is None:
            why = self.why_not_watched
            right, view = self._expected.reference.expected, self._view_without_predictions
            missing = view if self._is_missing else None
            where = where_without_view(self.observed, right, missing, why, self.why_no_view)
            if where is None and not self.measurement.comparison.structure:
                where = not_seen(self.why_no_view)  # each rank has those that it owns
            if where is not None and view is not None:
                where = self._beside_one_rank(where, view)
            return Localisation(whereabouts=where)
        with self.time.counted(WHEREABOUTS):
            has_cause = _believed(self.findings) is not None
            found = localise(self.view, has_cause, self.why_not_watched)
        where = found.whereabouts
        return replace(found, whereabouts=where and self._beside_one_rank(where, self.view))

    def _beside_one_rank(self, where: Whereabouts, view: View) -> Whereabouts:
        beside = self.beside
        if beside is None:
            return where
        return self.time.within(WHEREABOUTS, lambda: with_one_rank(where, beside, view), where)

    def _view_of_step(self, step: int) -> View | None:
        """One step as hypotheses see it before the ranks run; None if nothing can be predicted."""
        if why_unpredictable(self._request) and not self._follows_the_loss:
            return None
        return self._built_view(step)

    def _built_view(self, step: int) -> View | None:
        request = self._request
        sample = self.sample_of_step(0 if request.compare == "update" else step)
        if not sample.sizes:
            return None
        with without_planted_faults():
            batches = self._expected.batches()
            setting = setting_of(request, self._expected, batches, step)
        shards = setting.shards
        parts: PartsByRank | None = tuple((one,) for one in shards) if shards else None
        if request.strategy is not None and request.case.is_catalogue:
            sharded = sharded_batches(request.case, request.steps)[step]
            parts = request.strategy.parts_by_rank(sharded)
        return View.before_the_run(
            setting,
            sample,
            self._expected_of_step(sample, step),
            tuple(self._expected_of_step(sample, earlier) for earlier in range(step)),
            parts,
            self._cache(step) if sample.is_whole else {},
            self.time,
        )

    def _expected_of_step(self, sample: ElementSample[str], step: int) -> Tensor:
        step = 0 if self._request.compare == "update" else step
        right = self._expected.reference.expected
        return sample.of({name: right[step, name] for name in sample.sizes})

    def _cache(self, step: int) -> GradientCache:
        request, case = self._request, self._request.case
        if not case.is_catalogue:
            return {}
        scale = -request.lr if request.compare == "update" else 1.0
        return catalogue_cache(without_ranks(case), request.steps, step, request.training, scale)


def _believed(findings: tuple[Finding, ...]) -> Finding | None:
    """The best explanation, if it is accepted."""
    return findings[0] if findings and findings[0].accepted else None
