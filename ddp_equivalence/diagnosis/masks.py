"""Dropout on a GPU, whose generator draws other masks than that of the CPU.

The reference is computed on the CPU, so no gradient of a rank that drops something on a GPU can be
predicted from it, and the step is judged once more with dropout turned off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.without_dropout import trains_with_dropout, without_dropout
from ddp_equivalence.diagnosis.causes import (
    dropout_differs_from_reference,
    dropout_same_on_all_ranks,
)
from ddp_equivalence.diagnosis.finding import Finding, finding_from_observation
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.request import Request

ON_A_GPU = "a GPU draws other masks than the CPU, on which the big batch was computed"


ONLY_MASKS = (dropout_differs_from_reference.HYPOTHESIS.name,)
"""The causes of a step in which nothing but what is drawn differs."""


def drops_something(request: Request) -> bool:
    """True if modules of torch's own drop something in the model."""
    return trains_with_dropout(build_model(request.case))


def are_drawn_on_a_gpu(request: Request) -> bool:
    """True if the ranks draw what they drop on a GPU."""
    return request.lane.device_type != "cpu"


def request_without_masks(request: Request) -> Request | None:
    """The same request with dropout turned off; None if the step may not run again."""
    if request.in_process or not request.second_look:
        return None
    return replace(request, case=without_dropout(request.case))


def are_the_same_on_all_ranks(view: View | None) -> bool:
    """True if the step was seen to give all ranks the same seed."""
    return view is not None and bool(dropout_differs_from_reference.step_set_the_same_seed(view))


def finding_of_masks(view: View | None) -> Finding:
    """The masks as the only cause, since the step is right without dropout."""
    hypothesis = dropout_differs_from_reference.HYPOTHESIS
    seen = f"{ON_A_GPU}; with dropout turned off, the same step gives the big batch's gradient, so "
    seen += "the reduction is right"
    if are_the_same_on_all_ranks(view):
        hypothesis = dropout_same_on_all_ranks.HYPOTHESIS
        seen = f"the step set the same seed on all ranks before its forward pass; {seen}"
    return replace(finding_from_observation(hypothesis, seen), accepted=True)


def findings_beside_masks(findings: Sequence[Finding], view: View | None) -> tuple[Finding, ...]:
    """The findings of the step without dropout, and beside each that is accepted, the masks."""
    masks = finding_of_masks(view)
    return tuple(_beside(one, masks) if one.accepted else one for one in findings)


def _beside(finding: Finding, masks: Finding) -> Finding:
    """The finding with the masks as one more cause."""
    seen = f"{ON_A_GPU}; with dropout turned off, this cause remains"
    if finding.more:
        seen = f"{ON_A_GPU}; with dropout turned off, the other causes remain"
    return replace(
        finding,
        because="; ".join(filter(None, (finding.because, seen))),
        more=(*finding.more, masks),
    )
