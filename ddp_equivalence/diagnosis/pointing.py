"""Adds to the explanations that are believed the lines of code to look at, and what to write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.hypothesis import Hypothesis
from ddp_equivalence.diagnosis.lines.lost_results import lines_of_lost_results
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View

_BY_NAME = {hypothesis.name: hypothesis for hypothesis in HYPOTHESES}


def pointed(findings: Iterable[Finding], view: View) -> tuple[Finding, ...]:
    """The findings; those that are believed get their lines and their fix."""
    return tuple(_pointed(finding, view) if finding.accepted else finding for finding in findings)


def _pointed(finding: Finding, view: View) -> Finding:
    hypothesis = _BY_NAME.get(finding.cause)
    if hypothesis is None:
        return finding
    return replace(
        finding,
        fix=hypothesis.fix(view),
        lines=_lines(hypothesis, view),
        more=tuple(_pointed(one, view) for one in finding.more),
    )


def _lines(hypothesis: Hypothesis, view: View) -> tuple[PointedLine, ...]:
    """Those of the cause, and collectives whose result nothing uses, whatever the cause is."""
    lines = hypothesis.lines(view)
    known = {one.line for one in lines}
    return (*(one for one in lines_of_lost_results(view) if one.line not in known), *lines)
