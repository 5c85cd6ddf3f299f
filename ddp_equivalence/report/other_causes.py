"""The causes that were considered besides the accepted one, and why they are not believed."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.line import Line, labelled, paragraph

if TYPE_CHECKING:
    from ddp_equivalence.diagnosis.finding import Finding
    from ddp_equivalence.report.verdict import Verdict

MOST_RULED_OUT = 6


def other_causes_lines(verdict: Verdict) -> list[Line]:
    """The other causes: those that fit too, fit only the numbers, are ruled out, or cannot show."""
    accepted = [finding for finding in verdict.findings if finding.accepted]
    lines = _accepted_together(accepted)
    same_numbers = "; ".join(
        f"{finding.cause} ({finding.because or 'no observation supports it'})"
        for finding in verdict.findings
        if finding.fits and not finding.accepted
    )
    if same_numbers:
        lines += labelled("Fits the numbers, but: ", same_numbers)
    ruled_out = [finding for finding in verdict.findings if not finding.fits and finding.would_show]
    if ruled_out:
        label = "Ruled out: " if accepted else "Nearest known causes, none of which fits: "
        lines += labelled(label, ", ".join(_ruled_out(ruled_out)))
    hidden = ", ".join(
        finding.cause for finding in verdict.findings if not finding.fits and not finding.would_show
    )
    if hidden:
        lines += labelled("Could not be seen on this case: ", hidden)
    return lines


def _accepted_together(accepted: list[Finding]) -> list[Line]:
    """Several causes that explain the difference equally well, and what would tell them apart."""
    if len(accepted) < 2:
        return []
    names = ", ".join(" and ".join(finding.causes) for finding in accepted)
    lines = labelled("Cannot be told apart on this case: ", names)
    for finding in accepted:
        if finding.tell_apart:
            lines += paragraph(f"{finding.cause}: {finding.tell_apart}", "    ")
    return lines


def _ruled_out(findings: list[Finding]) -> Iterator[str]:
    """The nearest causes; those that leave equally much unexplained are counted under the first."""
    causes_by_rest: dict[str, list[str]] = {}
    for finding in findings:
        rest = finding.unexplained
        rest_text = ""
        if rest is not None and isfinite(rest):
            rest_text = f"{text_of(rest, '.2g')} unexplained"
        causes_by_rest.setdefault(rest_text, []).append(finding.cause)
    for number, (rest_text, causes) in enumerate(causes_by_rest.items()):
        if number == MOST_RULED_OUT:
            yield f"and {sum(map(len, list(causes_by_rest.values())[number:]))} more"
            return
        names = causes[0] if len(causes) == 1 else f"{causes[0]} and {len(causes) - 1} like it"
        yield f"{names} ({rest_text})" if rest_text else names
