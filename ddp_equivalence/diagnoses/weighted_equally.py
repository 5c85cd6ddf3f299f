"""The mean over ranks of means that divide by different numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_equivalence.diagnoses.hypothesis import Hypothesis, View, near


def _mean_of_means(view: View) -> Sequence[Tensor]:
    found = view.contributions()
    if found is None or view.is_sum() or view.has_batch_norm or view.has_dropout:
        return ()
    mean = found.mean(0)
    return () if near(mean, view.expected) else (view.everywhere(mean),)


def _is_mean_over_examples(view: View) -> bool:
    """True if the big batch is the mean of the parts, each counted by its examples."""
    parts = [part for of_rank in view.parts or () for part in of_rank if part]
    total = sum(map(len, parts))
    if not parts:
        return False
    mean = torch.stack([len(part) / total * view.gradient(part) for part in parts]).sum(0)
    return near(mean, view.expected)


def predict_shards(view: View) -> Sequence[Tensor]:
    return _mean_of_means(view) if _is_mean_over_examples(view) else ()


def predict_tokens(view: View) -> Sequence[Tensor]:
    return () if _is_mean_over_examples(view) else _mean_of_means(view)


SHARDS = Hypothesis(
    name="uneven_shards_weighted_equally",
    sentence="The ranks have different numbers of examples, and their means count equally.",
    look_at="the divisor of the loss: divide the summed loss by the examples of all ranks, "
    "times the world size under DDP",
    predict=predict_shards,
)

TOKENS = Hypothesis(
    name="token_counts_weighted_equally",
    sentence="Every rank divides by its own count (tokens, weights, positives), and these means "
    "count equally.",
    look_at="the divisor of the loss: all-reduce the count, and multiply the summed loss by the "
    "world size over it",
    predict=predict_tokens,
)
