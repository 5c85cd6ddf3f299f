"""The order of explanations, and which of those that fit are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import torch

from ddp_equivalence.comparison.digits import in_order
from ddp_equivalence.diagnosis.finding import Finding

LEAST_ACCEPTED = 1e-10
"""The rounding of float64: a right explanation may leave this much unexplained."""

AS_GOOD = 2.0
"""An explanation is as good as the best one if at most this many times as much is unexplained."""

ROUNDING = 8.0
"""It is also as good if it leaves at most this many eps of the case's dtype unexplained."""


def without_rounding(residual: float) -> float:
    """Zero for a residual that is only rounding, so that such explanations are equally good."""
    return 0.0 if residual < LEAST_ACCEPTED / 10 else residual


def ranked(findings: Sequence[Finding], dtype: torch.dtype) -> tuple[Finding, ...]:
    """All findings, the best first; those that are as good as the best are accepted.

    Equally good findings keep their order, which is the order in which hypotheses are believed.
    """
    candidates = _most_credible([finding for finding in findings if finding.explains])
    best = min((finding.unexplained or 0.0 for finding in candidates), default=0.0)
    most = max(AS_GOOD * best, ROUNDING * torch.finfo(dtype).eps, LEAST_ACCEPTED)
    accepted = {id(finding) for finding in candidates if (finding.unexplained or 0.0) <= most}
    return tuple(
        sorted(
            [replace(finding, accepted=id(finding) in accepted) for finding in findings],
            key=_position,
        )
    )


def _most_credible(explaining: list[Finding]) -> list[Finding]:
    """The findings of the most credible kind that there is.

    A finding that an observation supports is more credible than one that only fits the numbers.
    Among either, a prediction that took no number from the measurement is more credible.
    """
    for observed, fitted in ((True, False), (True, True), (False, False), (False, True)):
        group = [
            finding
            for finding in explaining
            if bool(finding.because) is observed and finding.fitted is fitted
        ]
        if group:
            return group
    return []


def _position(finding: Finding) -> tuple[bool, bool, float]:
    residual = inf if finding.unexplained is None else in_order(finding.unexplained)
    return not finding.accepted, not finding.fits, 0.0 if finding.accepted else residual
