"""Where a difference lies: in which half of the step, in which modules, in which precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.case import Case
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.gradients import ElementSample
from ddp_equivalence.diagnosis.causes import CAUSE_OF
from ddp_equivalence.diagnosis.causes.losses import ANOTHER_COUNT
from ddp_equivalence.diagnosis.diagnose import Finding, diagnose
from ddp_equivalence.diagnosis.example_gradients import ParameterElements
from ddp_equivalence.diagnosis.examples_read import rows_read_unequally
from ddp_equivalence.diagnosis.residual import unexplained
from ddp_equivalence.diagnosis.time_left import (
    BY_MODULE,
    WHEREABOUTS,
    WRONG_HALF,
    OutOfTime,
)
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.find_whereabouts import find_whereabouts, unless_it_fails
from ddp_equivalence.diagnosis.whereabouts.lines_of_partings import (
    ignores_the_loss,
    lines_of_partings,
    with_one_rank,
)
from ddp_equivalence.diagnosis.whereabouts.parting import BesideOneRank
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, not_seen
from ddp_equivalence.measurement.request import Request

# Where a difference lies: in which half of the step, in which modules, in multiples of weights.

EQUAL = 1e-6
"""Float64 vectors whose relative difference is smaller are equal."""

ROUNDING = 100.0
"""Vectors of a lower precision are equal if their relative difference is at most this many eps."""

PARALLEL = 0.98
"""A residual is called a multiple of the weights if its cosine with them is at least this."""

FEWEST_WEIGHTS = 3
"""With fewer elements a residual is easily parallel to the weights by chance."""

Half = Literal["local gradients", "reduction"]


@dataclass(frozen=True)
class Localisation:
    """Where the difference lies, in addition to its cause.

    ``wrong_half``: "reduction" if the ranks' local gradients are right but are reduced wrongly;
    "local gradients" if they are wrong but are reduced correctly; None if neither is certain.
    ``findings_by_module``: module -> the cause that fits on its parameters alone; None if a cause
    fits on all parameters. ``weight_multiples``: parameter -> c, where the difference is c times
    the parameter itself. ``whereabouts``: where the difference is, with lines; None if it has a
    cause, or if there was no time. ``rows``: which examples ranks read unequally often, as a
    sentence; "" if none, or if not known.
    """

    wrong_half: Half | None = None
    findings_by_module: Mapping[str, Finding] | None = None
    weight_multiples: Mapping[str, float] | None = None
    whereabouts: Whereabouts | None = None
    rows: str = ""


def localise(
    view: View, comparison: Comparison, has_cause: bool, why_not_watched: str = ""
) -> Localisation:
    """Everything that can be said about where a difference lies in one step.

    The costly parts are left out where the difference already has a cause.
    """
    multiples, by_module = None, None
    if not has_cause and view.setting.step == 0:
        multiples = multiples_of_weights(
            view.setting.case, view.parameters.sample, view.expected, view.measured.by_rank[0]
        )
    if not has_cause:
        with view.time.counted(BY_MODULE):
            by_module = dict(_findings_by_module(view, comparison))
    try:
        wrong_half = _wrong_half(view)
    except OutOfTime:
        wrong_half = None
        view.time.leave_out(WRONG_HALF)
    return Localisation(
        wrong_half=wrong_half,
        findings_by_module=by_module,
        weight_multiples=multiples,
        whereabouts=None if has_cause else whereabouts_of(view, why_not_watched),
        rows=_rows(view),
    )


def _rows(view: View) -> str:
    try:
        return rows_read_unequally(view)
    except OutOfTime:
        return ""


def whereabouts_of(view: View, why_not_watched: str) -> Whereabouts | None:
    """Where a difference is, whatever its cause; None without time for it."""
    with view.time.counted(WHEREABOUTS):
        try:
            return unless_it_fails(lambda: find_whereabouts(view, why_not_watched), not_seen)
        except OutOfTime:
            view.time.leave_out(WHEREABOUTS)
            return None


def multiples_of_weights(
    case: Case, sample: ElementSample[str], expected: Tensor, measured: Tensor
) -> Mapping[str, float]:
    """Parameter -> c, where measured - expected is c times the weights that it began with.

    ``expected``, ``measured``: shape (elements,).
    """
    initial = {name: weights.detach() for name, weights in build_model(case).named_parameters()}
    multiples = {}
    for name, place in ParameterElements(sample).places.items():
        weights = sample.only([name]).of({name: initial[name]})
        residual = measured[place] - expected[place]
        norms = float(weights.norm() * residual.norm())
        is_equal = float(residual.norm()) < EQUAL * float(expected.norm())
        if len(weights) < FEWEST_WEIGHTS or not norms or is_equal:
            continue
        product = float(weights @ residual)
        if abs(product) >= PARALLEL * norms:
            multiples[name] = product / float(weights @ weights)
    return multiples


def _wrong_half(view: View) -> Half | None:
    if view.observed_gradients is None or view.world_size == 1 or not view.local_gradients:
        return None
    seen = [one for of_rank in view.observed_gradients for one in of_rank]
    if not view.measured.is_finite or not all(bool(one.isfinite().all()) for one in seen):
        return None
    most = max(EQUAL, ROUNDING * torch.finfo(view.setting.dtype).eps)
    local = view.local_gradients[0]
    reduced = (local.mean(0), local.sum(0))
    reduction_is_right = any(
        unexplained(view.measured.by_rank, view.on_every_rank(one)) < most for one in reduced
    )
    local_is_right = any(unexplained(one, view.expected) < most for one in reduced)
    if reduction_is_right and not local_is_right:
        return "local gradients"
    return "reduction" if local_is_right and not reduction_is_right else None


def _findings_by_module(view: View, comparison: Comparison) -> Iterator[tuple[str, Finding]]:
    """Each module on whose parameters alone a cause fits, with that cause.

    A term of the loss that reaches only some modules may be wrong for a cause that has a name.
    """
    modules: dict[str, list[str]] = {}
    for name in view.parameters.names:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    if len(modules) == 1:
        return
    wrong = [one for one, names in modules.items() if view.measured.differing.issuperset(names)]
    for number, module in enumerate(wrong):
        view.time.show(f"{number} of {len(wrong)} modules")
        try:
            view.time.require()
            findings = diagnose(view.only(modules[module]), comparison)
        except OutOfTime:
            view.time.leave_out(BY_MODULE, f"{number} of {len(wrong)} modules tried")
            return
        found = next((one for one in findings if one.accepted and _may_be_of_a_module(one)), None)
        if found is not None:
            yield module, found


def _may_be_of_a_module(finding: Finding) -> bool:
    """True if a cause acts on single modules, or was seen; False for two causes at once.

    Some module has by chance a factor that is the ratio of two counts.
    """
    if finding.more or finding.besides or finding.cause == ANOTHER_COUNT.name:
        return False
    cause = CAUSE_OF.get(finding.cause)
    return bool(finding.because) or (cause is not None and cause.of_a_module)


# Decides whether a check in float64 has to be repeated in the model's own precision.

EPS = torch.finfo(torch.float32).eps

LARGEST, SMALLEST = 64 * EPS, EPS / 1024
"""Rounding in float32 leaves a relative error between these bounds in a check in float64."""


def has_the_size_of_float32(comparison: Comparison | None) -> bool:
    """True if the largest of all errors could have been left by rounding in float32."""
    largest = _largest_error(comparison)
    return largest is not None and SMALLEST <= largest <= LARGEST


def is_at_most_float32(comparison: Comparison | None) -> bool:
    """True if no error is larger than rounding in float32 leaves."""
    largest = _largest_error(comparison)
    return largest is not None and largest <= LARGEST


def _largest_error(comparison: Comparison | None) -> float | None:
    """The largest error of all parameters; None if the ranks disagree, or a gradient is missing."""
    if comparison is None or comparison.structure or not comparison.ranks_agree:
        return None
    parameters = [one for one in comparison.parameters if not one.limit.only_rounding]
    return max((one.error for one in parameters if one.norm > 0), default=0.0)


def in_float64(request: Request) -> Request | None:
    """The same request in float64; None if it is not of a user's own step."""
    if request.strategy is not None or request.plant or request.case.exact:
        return None
    return replace(request, case=replace(request.case, dtype=torch.float64))


def in_own_precision(request: Request) -> Request | None:
    """The same request in the precision in which the user's function builds the model.

    None if the function itself builds the model in float64.
    """
    case = replace(request.case, dtype=None)
    trained = [one for one in build_model(case).parameters() if one.requires_grad]
    if all(parameter.dtype is torch.float64 for parameter in trained):
        return None
    return replace(request, case=case)


# Lines for a cause that is told by numbers, from the same step on one rank.


def one_rank_shows_more(finding: Finding | None) -> bool:
    """True if the step is to run on one rank: no cause, a guess, one of which no line was seen, or
    one whose count made a line.
    """
    if finding is None or finding.is_guess or not finding.lines:
        return True
    return finding.cause == ANOTHER_COUNT.name


def findings_beside_one_rank(
    findings: tuple[Finding, ...], view: View, beside: BesideOneRank | None
) -> tuple[Finding, ...]:
    """The findings, once the step has run on one rank.

    A backward method that ignores how the loss is scaled explains any wrong factor. A wrong count
    gets the lines that compute it, if one rank computes it as well, and a cause without lines those
    at which the ranks part from one rank.
    """
    if not findings or not findings[0].accepted or beside is None:
        return findings
    if ignores_the_loss(beside, view):
        return tuple(replace(one, accepted=False) for one in findings)
    best, *others = findings
    return (_with_lines_of_the_count(best, view, beside), *others)


def _with_lines_of_the_count(finding: Finding, view: View, beside: BesideOneRank) -> Finding:
    if not finding.lines and beside.is_right_alone:
        return replace(finding, lines=lines_of_partings(beside.partings, view))
    if finding.cause != ANOTHER_COUNT.name or finding.more:
        return finding
    found = None if beside.is_right_alone else whereabouts_of(view, "")
    if found is None or found.kind == "not seen":
        return finding
    lines = with_one_rank(found, beside, view).lines
    return replace(finding, lines=lines) if lines else finding
