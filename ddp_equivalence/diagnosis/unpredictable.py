"""Checks for which no cause predicts what the ranks would hold."""

from __future__ import annotations

from ddp_equivalence.measurement.request import Request


def why_unpredictable(request: Request) -> str:
    """Why nothing can be predicted of what the ranks of a request hold; "" if it can."""
    if request.training.is_of_the_user:
        return "the reference is your own, and nothing can be predicted from it"
    if request.compare == "gradients":
        return ""
    if not request.training.is_plain_sgd:
        return "what another optimizer than plain SGD does to the weights is not predicted"
    if request.step_count > 1:
        return "after its first step a wrong run has weights that no prediction is made for"
    return ""
