"""Only the last micro-batch of every window is in the gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The mean of the ranks' last micro-batches, divided by the number of micro-batches or not."""
    parts = view.parts.by_rank
    if parts is None or all(len(of_rank) == 1 for of_rank in parts):
        return ()
    detail = f"1 of the {max(map(len, parts))} micro-batches of the accumulation window"
    last = [
        (torch.stack([gradients[-1] for gradients in by_rank]).mean(0), detail)
        for by_rank in view.micro_batch_gradients
    ]
    undivided = torch.stack([view.examples.gradient(of_rank[-1]) for of_rank in parts]).mean(0)
    last.append((undivided, "not divided by the number of micro-batches"))
    return tuple(Prediction(view.on_every_rank(mean), detail) for mean, detail in last)


HYPOTHESIS = Hypothesis(
    name="only_last_micro_batch",
    sentence="Only the last micro-batch of the accumulation window is in the gradient.",
    look_at="zero_grad inside the loop over micro-batches, or a gradient that is set, not added to",
    predict=predict,
    tell_apart="Use at least two micro-batches with different examples.",
)
