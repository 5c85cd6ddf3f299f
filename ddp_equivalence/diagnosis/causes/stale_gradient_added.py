"""The gradient of an earlier step or pass was still there when this one was added."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.hypothesis import Factor, Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    ways = []
    for count in range(1, len(view.previous) + 1):
        earlier = torch.stack(view.previous[-count:]).sum(0)
        steps = "step" if count == 1 else f"{count} steps"
        ways.append(
            Way(view.everywhere(view.expected + earlier), f"that of the {steps} before is in it")
        )
    return tuple(ways)


def factors(view: View) -> Sequence[Factor]:
    return (Factor(2.0, "that of an earlier pass over the same examples is in it"),)


def sign(view: View) -> Sign | None:
    if not view.observed or view.previous:
        return None
    now = len(view.before)
    passes = max(sum(b.step == now for b in seen.backwards) for seen in view.observed.values())
    return indications.only_if(
        passes > 1 and not (view.micro_batches or 1) > 1,
        f"backward was called {passes} times in this step",
        "backward was called once in this step",
    )


HYPOTHESIS = Hypothesis(
    name="stale_gradient_added",
    sentence="An earlier gradient had not been cleared when this one was added to it.",
    look_at="zero_grad() before the backward of every step, and for every parameter, also those "
    "that no optimizer holds",
    predict=predict,
    factors=factors,
    sign=sign,
    tell_apart="two steps on different examples, and another world size than 2",
)
