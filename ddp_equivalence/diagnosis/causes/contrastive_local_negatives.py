"""A loss that compares examples with each other sees only those of its own rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.causes.uneven_shards_weighted_equally import is_mean_over_examples
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Way
from ddp_equivalence.diagnosis.view import View, near

NAME = "contrastive_local_negatives"


def predict(view: View) -> Sequence[Way]:
    return of_local_losses(view) if view.batch_coupled in (NAME, None) else ()


def of_local_losses(view: View) -> Sequence[Way]:
    """The mean of losses that each look at their own shard only."""
    found = view.contributions()
    if found is None or view.part_count == 1 or view.is_sum():
        return ()
    if view.has_batch_norm or view.has_dropout or not _compares_examples(view):
        return ()
    # Equally, or by their examples where a global count divides.
    sizes = [sum(map(len, of_rank)) for of_rank in view.parts or ()]
    counted = [size * row for size, row in zip(sizes, found, strict=True) if size]
    ways = [found.mean(0), *view.put_together()]
    if counted:
        ways.append(torch.stack(counted).sum(0) / sum(sizes))
    return tuple(Way(view.everywhere(way)) for way in ways if not near(way, view.expected))


def _compares_examples(view: View) -> bool:
    """True if it is known, or if single examples have no gradient though the batch has one."""
    if view.batch_coupled:
        return True
    if is_mean_over_examples(view):
        return False
    first = [view.gradient((index,)) for index in range(min(view.examples, 3))]
    size = float(view.expected.norm())
    return all(float(one.nan_to_num(0.0).norm()) < 1e-9 * size for one in first)


HYPOTHESIS = Hypothesis(
    name=NAME,
    sentence="The loss compares examples with each other, and on every rank only with those of its "
    "own shard: fewer negatives than in the big batch. This is a property of the loss, not a fault "
    "of the reduction.",
    look_at="the loss: gather the outputs of all ranks with their gradient "
    "(torch.distributed.nn.functional.all_gather) before it",
    predict=predict,
    tell_apart="one example a rank, which then has nothing to compare with and no gradient",
)
