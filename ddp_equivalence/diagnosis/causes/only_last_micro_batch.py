"""Only the last micro-batch of every window is in the gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    if view.parts is None or all(len(of_rank) == 1 for of_rank in view.parts):
        return ()
    ways = []
    most = max(map(len, view.parts))
    for of_ranks in view.micro:
        last = torch.stack([of_rank[-1] for of_rank in of_ranks]).mean(0)
        detail = f"1 of the {most} micro-batches of the window"
        ways.append(Way(view.everywhere(last), detail))
    whole = torch.stack([view.gradient(of_rank[-1]) for of_rank in view.parts]).mean(0)
    ways.append(Way(view.everywhere(whole), "not divided by the micro-batches of the window"))
    return tuple(ways)


HYPOTHESIS = Hypothesis(
    name="only_last_micro_batch",
    sentence="Only the last micro-batch of the window is in the gradient.",
    look_at="zero_grad inside the loop over micro-batches, or gradients set instead of added",
    predict=predict,
    tell_apart="at least two micro-batches, of different examples",
)
