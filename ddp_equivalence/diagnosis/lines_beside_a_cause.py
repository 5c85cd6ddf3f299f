"""Lines for a cause that is told by numbers, from the same step on one rank."""

from __future__ import annotations

from dataclasses import replace

from ddp_equivalence.diagnosis.causes import divided_by_another_count
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.localisation import whereabouts_of
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.beside_one_rank import BesideOneRank
from ddp_equivalence.diagnosis.whereabouts.lines_of_partings import with_one_rank


def one_rank_shows_more(finding: Finding | None) -> bool:
    """True if the step is to run on one rank: no cause, a guess, or one whose count made a line."""
    if finding is None or finding.is_guess:
        return True
    return finding.cause == divided_by_another_count.HYPOTHESIS.name


def findings_beside_one_rank(
    findings: tuple[Finding, ...], view: View, beside: BesideOneRank | None
) -> tuple[Finding, ...]:
    """The findings, once the step has run on one rank.

    A method that computes the loss in its own way explains any wrong factor. A wrong count gets the
    lines that compute it, if one rank computes it as well.
    """
    if not findings or not findings[0].accepted or beside is None:
        return findings
    if beside.deaf:
        return tuple(replace(one, accepted=False) for one in findings)
    best, *others = findings
    return (_with_lines_of_the_count(best, view, beside), *others)


def _with_lines_of_the_count(finding: Finding, view: View, beside: BesideOneRank) -> Finding:
    if finding.cause != divided_by_another_count.HYPOTHESIS.name or finding.more:
        return finding
    found = None if beside.is_right_alone else whereabouts_of(view, "")
    if found is None or found.kind == "not seen":
        return finding
    lines = with_one_rank(found, beside, view).lines
    return replace(finding, lines=lines) if lines else finding
