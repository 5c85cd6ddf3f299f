"""On every rank, a contrastive loss has only the negatives of the rank's own shard."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import torch

from ddp_equivalence.diagnosis.causes.uneven_shards_weighted_equally import is_mean_over_examples
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction
from ddp_equivalence.diagnosis.lines.of_loss import COMPARISONS, loss_lines
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View

NAME = "contrastive_local_negatives"

NO_GRADIENT = 1e-9
"""A gradient with a smaller norm, relative to the big batch's, is only rounding."""

EXAMPLES_TRIED = 3
"""This many single examples without a gradient show that the loss compares examples."""


def predict(view: View) -> Sequence[Prediction]:
    """The mean of the ranks' losses, where the loss may compare examples with each other."""
    return mean_of_local_losses(view) if view.setting.batch_coupled in (NAME, None) else ()


def mean_of_local_losses(view: View) -> Sequence[Prediction]:
    """The mean of losses that were each computed from one shard alone.

    Empty where the loss does not compare examples with each other.
    """
    contributions = view.parts.contributions()
    if contributions is None or view.parts.count == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    if (
        view.setting.has_batch_norm
        or view.examples.draws_random_numbers
        or not _compares_examples(view)
    ):
        return ()
    means = [contributions.mean(0), *view.averages_of_node_sums()]
    # A loss that divides by a global count weights the ranks by their examples instead.
    sizes = [len(shard) for shard in view.parts.examples_by_rank]
    weighted = [size * row for size, row in zip(sizes, contributions, strict=True) if size]
    if weighted:
        means.append(torch.stack(weighted).sum(0) / sum(sizes))
    return tuple(
        Prediction(view.on_every_rank(mean))
        for mean in means
        if not nearly_equal(mean, view.expected)
    )


def _compares_examples(view: View) -> bool:
    """True if the loss is known to compare examples, or if single examples have no gradient."""
    if view.setting.batch_coupled:
        return True
    if is_mean_over_examples(view):
        return False
    tried = range(min(view.setting.example_count, EXAMPLES_TRIED))
    norms = [float(view.examples.gradient((index,)).nan_to_num(0.0).norm()) for index in tried]
    if max(norms, default=0.0) >= NO_GRADIENT * float(view.expected.norm()):
        return False
    # Where outputs are centred over the batch, a single example has no gradient, but a loss.
    losses = [abs(view.examples.loss((index,))) for index in tried]
    most = NO_GRADIENT * abs(view.examples.big_batch_loss)
    return all(isnan(loss) or loss <= most for loss in losses)


def lines(view: View) -> Sequence[PointedLine]:
    """The line that compares examples with each other."""
    return loss_lines(view, COMPARISONS, "compares the examples of one rank")


def fix(view: View) -> str:
    """Gather the outputs."""
    return "none is needed; compare all ranks' outputs, gathered with their gradient."


HYPOTHESIS = Hypothesis(
    name=NAME,
    sentence="The loss compares examples with each other, and every rank compares only those of "
    "its own shard, so that an example has fewer negatives than in the big batch. This is a "
    "property of the loss, not a fault of the reduction.",
    look_at="the input of the loss: gather the outputs of all ranks, with their gradient "
    "(torch.distributed.nn.functional.all_gather)",
    predict=predict,
    tell_apart="Give each rank one example: it then has nothing to compare with and no gradient.",
    headline="contrastive loss lacks other ranks' examples",
    lines=lines,
    fix=fix,
)
