"""The mean over ranks of means over different numbers of examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The mean of the ranks' means, where the big batch weights them by their examples."""
    return mean_of_means(view) if is_mean_over_examples(view) else ()


def mean_of_means(view: View) -> Sequence[Prediction]:
    """The mean of what the ranks contribute, unless that is the big batch's gradient."""
    contributions, setting = view.parts.contributions(), view.setting
    if contributions is None or view.parts.add_up_to_the_big_batch:
        return ()
    if setting.has_batch_norm or setting.batch_coupled:
        return ()
    mean = contributions.mean(0)
    if nearly_equal(mean, view.expected) or view.examples.draws_random_numbers:
        return ()
    return (Prediction(view.on_every_rank(mean)),)


def is_mean_over_examples(view: View) -> bool:
    """True if the big batch is the mean of the parts, each weighted by its examples."""
    parts = [part for of_rank in view.parts.by_rank or () for part in of_rank if part]
    if not parts:
        return False
    example_count = sum(map(len, parts))
    weighted = [len(part) / example_count * view.examples.gradient(part) for part in parts]
    return nearly_equal(torch.stack(weighted).sum(0), view.expected)


HYPOTHESIS = Hypothesis(
    name="uneven_shards_weighted_equally",
    sentence="The ranks have different numbers of examples, and their means count equally.",
    look_at="the divisor of the loss: divide the summed loss by the number of examples on all "
    "ranks; under DDP, also multiply it by the world size",
    predict=predict,
    tell_apart="Give all ranks equally many examples: only this difference then goes away.",
    limits_must_catch=True,
)
