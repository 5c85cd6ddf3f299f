"""The mean over ranks of means over different numbers of examples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction, Words
from ddp_equivalence.diagnosis.lines.of_loss import line_of_loss
from ddp_equivalence.diagnosis.lines.of_reduction import averages, is_unseen, line_of_reduction
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.means_of_parts import Over, means_over, nearest_mean
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View

MOST_COUNTS = 8
"""With more ranks a report does not list how many examples each of them has."""


def predict(view: View) -> Sequence[Prediction]:
    """The mean of the ranks' means, where the big batch weights them by their examples."""
    return mean_of_means(view) if is_mean_over_examples(view) else ()


def mean_of_means(view: View) -> Sequence[Prediction]:
    """The mean of what the ranks contribute, unless that is the big batch's gradient.

    Each rank may take a mean of every micro-batch, or one mean of all of them.
    """
    setting = view.setting
    if view.parts.by_rank is None or view.parts.add_up_to_the_big_batch:
        return ()
    if setting.has_batch_norm or setting.batch_coupled or view.examples.draws_random_numbers:
        return ()
    means = means_over(view)
    plain = next(iter(means), None) is Over.MICRO_BATCH and Over.WINDOW not in means
    return tuple(
        Prediction(
            view.on_every_rank(mean),
            "" if plain and over is Over.MICRO_BATCH else f"the means are over {over.value}",
        )
        for over, mean in means.items()
    )


def is_mean_over_examples(view: View) -> bool:
    """True if the big batch is the mean of the parts, each weighted by its examples."""
    parts = [part for of_rank in view.parts.by_rank or () for part in of_rank if part]
    if not parts:
        return False
    example_count = sum(map(len, parts))
    weighted = [len(part) / example_count * view.examples.gradient(part) for part in parts]
    return nearly_equal(torch.stack(weighted).sum(0), view.expected)


def _uneven_micro_batches(view: View) -> tuple[int, ...]:
    """How many examples the micro-batches of a rank have, if only these are uneven."""
    if nearest_mean(view) is Over.WINDOW:
        return ()
    counts = {tuple(map(len, of_rank)) for of_rank in view.parts.by_rank or ()}
    if len(counts) != 1:
        return ()
    sizes = counts.pop()
    return sizes if len(set(sizes)) > 1 else ()


def words(view: View) -> Words | None:
    """The same of micro-batches, where all ranks have equally many examples."""
    if not _uneven_micro_batches(view):
        return None
    return Words(
        "The micro-batches have different numbers of examples, and their means count equally.",
        "uneven micro-batches count equally",
    )


def lines(view: View) -> Sequence[PointedLine]:
    """Where each rank takes its own mean, and where the means are averaged."""
    sizes = _uneven_micro_batches(view)
    if sizes:
        shown = ", ".join(map(str, sizes[:MOST_COUNTS])) + (", ..." if sizes[MOST_COUNTS:] else "")
        note = f"means over {shown} examples, one by one"
        return in_order(view, line_of_loss(view, note, True), line_of_reduction(view))
    counts = _examples_by_rank(view)
    own = f"means over {counts} examples, by rank" if counts else "each rank's own mean"
    return in_order(
        view,
        line_of_loss(view, own, True),
        line_of_reduction(view, lambda seen: f"{seen}: all count equally"),
    )


def _examples_by_rank(view: View) -> str:
    """How many examples each rank has, as text; "" if that is not known, or there are many."""
    counts = [sum(map(len, of_rank)) for of_rank in view.parts.by_rank or ()]
    return ", ".join(map(str, counts)) if len(counts) <= MOST_COUNTS else ""


def fix(view: View) -> str:
    """Divide by the number of examples on all ranks."""
    count = view.world_size
    if _uneven_micro_batches(view):
        return "divide each micro-batch's summed loss by the examples of all of them on this rank."
    summed = f"divide the summed loss by all {view.setting.example_count} examples"
    if is_unseen(view):
        return f"{summed}; under DDP, multiply it by {count} too."
    if averages(view):
        return f"{summed}, and multiply it by {count}, the number of ranks."
    return f"{summed}, and add the ranks' gradients up."


HYPOTHESIS = Hypothesis(
    name="uneven_shards_weighted_equally",
    sentence="The ranks have different numbers of examples, and their means count equally.",
    look_at="the divisor of the loss: divide the summed loss by the number of examples on all "
    "ranks; under DDP, also multiply it by the world size",
    predict=predict,
    tell_apart="Give all ranks equally many examples: only this difference then goes away.",
    headline="uneven shards count equally",
    lines=lines,
    fix=fix,
    limits_must_catch=True,
    words=words,
)
