"""Where a difference lies: at which lines, and in which precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isclose

import torch

from ddp_equivalence.case.build import build_model
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.causes.losses import ANOTHER_COUNT
from ddp_equivalence.diagnosis.diagnose import Finding, finding_without_prediction
from ddp_equivalence.diagnosis.divisors import what_the_big_batch_divides_by
from ddp_equivalence.diagnosis.examples_read import rows_read_unequally
from ddp_equivalence.diagnosis.lines.of_reduction import common_factor
from ddp_equivalence.diagnosis.own_errors import unless_it_fails
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE
from ddp_equivalence.diagnosis.time_left import WHEREABOUTS, OutOfTime
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.where.divergence import BesideOneRank
from ddp_equivalence.diagnosis.where.find_whereabouts import find_whereabouts
from ddp_equivalence.diagnosis.where.lines_of_divergences import (
    ignores_the_loss,
    lines_of_divergences,
    the_wrong_count,
    with_one_rank,
    wrong_loss,
)
from ddp_equivalence.diagnosis.where.whereabouts import Whereabouts, not_seen
from ddp_equivalence.measurement.gradient_watch import factor_between
from ddp_equivalence.measurement.request import Request


@dataclass(frozen=True)
class Localisation:
    """Where the difference lies, in addition to its cause.

    ``whereabouts``: where the difference is, with lines; None if it has a cause, or if there was no
    time. ``rows``: which examples ranks read unequally often, as a sentence; "" if none, or if not
    known.
    """

    whereabouts: Whereabouts | None = None
    rows: str = ""


def localise(view: View, has_cause: bool, why_not_watched: str = "") -> Localisation:
    """Everything that can be said about where a difference lies in one step.

    The costly parts are left out where the difference already has a cause.
    """
    return Localisation(
        whereabouts=None if has_cause else whereabouts_of(view, why_not_watched),
        rows=_rows(view),
    )


def _rows(view: View) -> str:
    try:
        return rows_read_unequally(view)
    except OutOfTime:
        return ""


def unless_ranks_differ_by_factors(
    findings: tuple[Finding, ...], view: View
) -> tuple[Finding, ...]:
    """The findings. A cause that leaves a factor over is not believed where every rank holds the
    right gradient times a number of its own: the factor is as wrong as theirs.
    """
    if not findings or not findings[0].accepted or findings[0].besides is None:
        return findings
    held = [factor_between(view.expected, one, NEGLIGIBLE) for one in view.measured.by_rank]
    known = [one for one in held if one is not None]
    if len(known) < len(held) or max(known) - min(known) <= NEGLIGIBLE * abs(known[0]):
        return findings
    return tuple(replace(one, accepted=False) for one in findings)


def whereabouts_of(view: View, why_not_watched: str) -> Whereabouts | None:
    """Where a difference is, whatever its cause; None without time for it."""
    return view.time.within(
        WHEREABOUTS,
        lambda: unless_it_fails(lambda: find_whereabouts(view, why_not_watched), not_seen),
        None,
    )


EPS = torch.finfo(torch.float32).eps

LARGEST, SMALLEST = 64 * EPS, EPS / 1024
"""Rounding in float32 leaves a relative error between these bounds in a check in float64."""


def has_the_size_of_float32(comparison: Comparison | None) -> bool:
    """True if the largest of all errors could have been left by rounding in float32."""
    return SMALLEST <= _largest_error(comparison) <= LARGEST


def is_at_most_float32(comparison: Comparison | None) -> bool:
    """True if no error is larger than rounding in float32 leaves."""
    return _largest_error(comparison) <= LARGEST


def _largest_error(comparison: Comparison | None) -> float:
    """The largest error of all parameters; infinite if the ranks disagree, or one is missing."""
    if comparison is None or comparison.structure or not comparison.ranks_agree:
        return inf
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
    if beside is None or beside.is_right_alone is None:
        return findings
    if ignores_the_loss(beside, view):
        return tuple(replace(one, accepted=False) for one in findings)
    is_known = bool(findings) and findings[0].accepted
    if not is_known or findings[0].is_guess:
        counted = _seen_to_divide(view, beside)
        if counted is not None:
            return (counted, *(replace(one, accepted=False) for one in findings))
    if not is_known:
        return findings
    best, *others = findings
    return (_with_lines_of_the_count(best, view, beside), *others)


def _seen_to_divide(view: View, beside: BesideOneRank) -> Finding | None:
    """The cause that a number is not the right count: the loss was seen to be divided by one on one
    rank, and with what the loss of the case was seen to divide by in its place it would be right.
    """
    factor, right = beside.factor_alone, None
    if factor is None or beside.is_right_alone or not _is(common_factor(view), factor):
        return None
    wrong = the_wrong_count(beside.scalings, factor)
    if wrong is not None and wrong.divides:
        right = what_the_big_batch_divides_by(view)
    if wrong is None or right is None or not _is(sum(right.counts), wrong.number * factor):
        return None
    was, total = (text_of(one, ".6g") for one in (wrong.number, sum(right.counts)))
    # Where every rank divides by a count of its own part, the number is another one there.
    is_of_all = all(
        any((one.line, one.number) == (wrong.line, wrong.number) for one in of_rank)
        for of_rank in beside.scalings_of_ranks
    )
    fix = f"divide by {total} ({right.unit}), not by {was}."
    alone = "" if is_of_all else "on one rank "
    return replace(
        finding_without_prediction(ANOTHER_COUNT),
        accepted=True,
        fits=True,
        unexplained=0.0,
        detail=f"{alone}divided by {was}, instead of {total}, {right.unit}",
        fix=fix if is_of_all else f"count {right.unit} in the marked line.",
        lines=wrong_loss(not_seen(""), beside, view).lines,
    )


def _is(number: float | None, other: float) -> bool:
    return number is not None and isclose(number, other, rel_tol=NEGLIGIBLE)


def _with_lines_of_the_count(finding: Finding, view: View, beside: BesideOneRank) -> Finding:
    if not finding.lines and beside.is_right_alone:
        of_the_loss = replace(beside, lines_of_case={})  # which is not additive, for instance
        return replace(finding, lines=lines_of_divergences(of_the_loss, view))
    if finding.cause != ANOTHER_COUNT.name or finding.more:
        return finding
    found = None if beside.is_right_alone else whereabouts_of(view, "")
    if found is None or found.kind == "not seen":
        return finding
    lines = with_one_rank(found, beside, view).lines
    return replace(finding, lines=lines) if lines else finding
