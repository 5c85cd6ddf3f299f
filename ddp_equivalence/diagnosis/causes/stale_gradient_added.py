"""The gradient of an earlier step or pass was still there when this one was added."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    WrongFactor,
)
from ddp_equivalence.diagnosis.indications import indication_if
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The big batch plus the gradients of the last one, two ... steps before."""
    earlier = view.examples.earlier_expected
    predictions = []
    for count in range(1, len(earlier) + 1):
        total = view.expected + torch.stack(earlier[-count:]).sum(0)
        steps = "step" if count == 1 else f"{count} steps"
        detail = f"that of the {steps} before is in it"
        predictions.append(Prediction(view.on_every_rank(total), detail))
    return tuple(predictions)


def factors(view: View) -> Sequence[WrongFactor]:
    """Two, where the same examples were passed before."""
    return (WrongFactor(2.0, "that of an earlier pass over the same examples is in it"),)


def indication(view: View) -> Indication | None:
    """Counts the calls of backward in a first step."""
    if not view.observed.by_rank or view.setting.step > 0:
        return None
    passes = max(len(view.observed.backwards(rank)) for rank in view.observed.by_rank)
    return indication_if(
        passes > 1 and not (view.parts.micro_batches_per_rank or 1) > 1,
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
    indication=indication,
    tell_apart="Take two steps on different examples, with another world size than 2.",
)
