"""The mean over ranks of means over different numbers of examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Way
from ddp_equivalence.diagnosis.view import View, near


def mean_of_means(view: View) -> Sequence[Way]:
    """The mean of what the ranks contribute, where that is not the big batch."""
    found = view.contributions()
    if found is None or view.is_sum() or view.has_batch_norm or view.has_dropout:
        return ()
    if view.batch_coupled:
        return ()
    mean = found.mean(0)
    return () if near(mean, view.expected) else (Way(view.everywhere(mean)),)


def is_mean_over_examples(view: View) -> bool:
    """True if the big batch is the mean of the parts, each counted by its examples."""
    parts = [part for of_rank in view.parts or () for part in of_rank if part]
    total = sum(map(len, parts))
    if not parts:
        return False
    mean = torch.stack([len(part) / total * view.gradient(part) for part in parts]).sum(0)
    return near(mean, view.expected)


def predict(view: View) -> Sequence[Way]:
    return mean_of_means(view) if is_mean_over_examples(view) else ()


HYPOTHESIS = Hypothesis(
    name="uneven_shards_weighted_equally",
    sentence="The ranks have different numbers of examples, and their means count equally.",
    look_at="the divisor of the loss: divide the summed loss by the examples of all ranks, "
    "times the world size under DDP",
    predict=predict,
    tell_apart="shards of one size: only this one then goes away",
    of_the_rule=True,
)
