"""The mean of the ranks' gradients, where each loss is a mean over a part of the big batch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.residual import nearly_equal, unexplained
from ddp_equivalence.diagnosis.view import View


class Over(Enum):
    """What the loss of a backward pass is a mean over. The value is a phrase for a report."""

    MICRO_BATCH = "each micro-batch of a rank"
    WINDOW = "all micro-batches of a rank"
    ALL_RANKS = "each micro-batch of all ranks together"


def means_over(view: View) -> Mapping[Over, Tensor]:
    """What all ranks hold, for each way to take means that does not give the big batch.

    The means count equally: those of a rank's micro-batches, and those of the ranks. A way that
    gives the same as an earlier one is left out. Empty where the parts are not known.
    """
    by_rank, contributions = view.parts.by_rank, view.parts.contributions()
    if by_rank is None or contributions is None:
        return {}
    found = {Over.MICRO_BATCH: contributions.mean(0)}
    gradient = view.examples.gradient
    if any(len(parts) > 1 for parts in by_rank):
        shards = view.parts.examples_by_rank
        found[Over.WINDOW] = torch.stack([gradient(shard) for shard in shards]).mean(0)
    count = view.parts.micro_batches_per_rank
    if count is not None and count > 1 and view.world_size > 1:
        at_once = [tuple(i for part in parts for i in part) for parts in zip(*by_rank, strict=True)]
        found[Over.ALL_RANKS] = torch.stack([gradient(part) for part in at_once]).mean(0)
    distinct: dict[Over, Tensor] = {}
    for over, mean in found.items():
        if not any(nearly_equal(mean, one) for one in (view.expected, *distinct.values())):
            distinct[over] = mean
    return distinct


def nearest_mean(view: View) -> Over:
    """The way to take means whose gradient is, up to a factor, nearest to what the ranks hold."""
    means = means_over(view)
    if not means or not view.measured.is_known:
        return Over.MICRO_BATCH

    def rest(over: Over) -> float:
        mean, held = means[over], view.measured.by_rank.mean(0)
        square = float(mean @ mean)
        return unexplained(held, float(held @ mean) / square * mean) if square > 0 else 1.0

    return min(means, key=rest)
