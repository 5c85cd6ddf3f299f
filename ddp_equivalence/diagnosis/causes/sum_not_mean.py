"""The ranks hold the sum of their gradients, where they should hold the mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.causes import token_counts_weighted_equally
from ddp_equivalence.diagnosis.causes.uneven_shards_weighted_equally import is_mean_over_examples
from ddp_equivalence.diagnosis.factors_of_ranks import also_on_one_rank
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction, WrongFactor
from ddp_equivalence.diagnosis.lines.of_reduction import (
    by_hand,
    ddp_reduces,
    in_hook,
    is_unseen,
    line_of_reduction,
    line_that_scales,
    line_that_scales_gradients,
)
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.reduced import sum_is_right, sums_repeated
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Contents


def predict(view: View) -> Sequence[Prediction]:
    """The sum of what the ranks contribute, and the world size times the big batch."""
    if view.world_size == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    multiple = view.world_size * view.expected
    contributions = view.parts.contributions()
    if contributions is None:
        return (Prediction(view.on_every_rank(multiple)),)
    sums = [multiple, contributions.sum(0)]
    constant = view.examples.data_independent_gradient()
    if constant is not None:
        # The data-independent terms may have been kept out of the sum.
        sums.append(contributions.sum(0) - (view.world_size - 1) * constant)
    return tuple(Prediction(view.on_every_rank(one)) for one in sums)


def factors(view: View) -> Sequence[WrongFactor]:
    """The world size, where the ranks' gradients should be averaged."""
    if view.world_size == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    return (WrongFactor(view.world_size, f"multiplied by {view.world_size}, the number of ranks"),)


def indication(view: View) -> Indication | None:
    """Speaks against this cause if what differs was divided, or went into several sums.

    Also against it if one rank, which has nothing to add up, leaves the same factor.
    """
    count, differing = view.world_size, view.measured.differing
    if differing and differing <= set(sums_repeated(view)):
        return Indication(False, "the gradients that differ went into several sums over all ranks")
    if sum_is_right(view) and line_that_scales_gradients(view, count) is None:
        return Indication(False, "the sum of what the ranks computed is the big batch's gradient")
    divided = {name for one in view.observed.calls.multiplied_by(1 / count) for name in one.names}
    if view.measured.only_some_parameters_differ and differing <= divided:
        return Indication(False, f"a line divides these gradients by {count}")
    return also_on_one_rank(view, count)


def lines(view: View) -> Sequence[PointedLine]:
    """Where gradients are added up, and where they or the loss are multiplied."""
    count = view.world_size
    scaled = line_that_scales(view, count)
    if scaled is not None:
        return in_order(view, line_of_reduction(view), scaled)
    divided = line_that_scales(view, 1 / count)
    if divided is not None:
        return in_order(view, line_of_reduction(view), replace(divided, is_fault=False))
    missing = f"a division of the gradients by {count}"
    # What becomes of a copy of the gradients is not watched.
    in_place = all(
        place.first.collective is not None and place.first.collective.contents is Contents.GRADIENTS
        for place in by_hand(view)
    )
    undivided = "; no line divides them" if in_place else ""
    if not by_hand(view):
        return in_order(view, line_of_reduction(view, is_fault=True, missing=missing))
    return in_order(view, line_of_reduction(view, lambda seen: f"{seen}{undivided}", True, missing))


def fix(view: View) -> str:
    """Divide by the world size, or do not multiply by it."""
    count = view.world_size
    scaled = line_that_scales(view, count)
    if scaled is not None:
        what = "the loss" if line_that_scales_gradients(view, count) is None else "the gradients"
        why = f": DDP averages over the {count} ranks by itself" if ddp_reduces(view) else ""
        if _means_weigh_unequally(view):
            # Without this factor the loss would still be a mean over the rank's own count.
            return token_counts_weighted_equally.fix(view)
        return f"do not multiply {what} by {count}{why}."
    if is_unseen(view):
        return f"divide the gradients by {count}, the ranks, or do not multiply the loss by it."
    where = "in the hook" if in_hook(view) and not by_hand(view) else "after the reduction"
    return f"divide the gradients by {count}, the number of ranks, {where}."


def _means_weigh_unequally(view: View) -> bool:
    """True if the ranks' means do not weigh as they should either, as counts of them show."""
    contributions = view.parts.contributions()
    if contributions is None or nearly_equal(contributions.mean(0), view.expected):
        return False
    return is_mean_over_examples(view) or token_counts_weighted_equally.counted(view) is not None


HYPOTHESIS = Hypothesis(
    name="sum_not_mean",
    sentence="The ranks hold the sum of their gradients, not the mean: too large by the factor "
    "of their number.",
    look_at="a loss that is multiplied by the world size under DDP, which averages by itself; the "
    "factor after the last all_reduce; a communication hook that sums and does not average",
    predict=predict,
    factors=factors,
    indication=indication,
    tell_apart="Use another world size: no other cause has a factor that changes with it.",
    headline="gradients are a sum, not a mean",
    lines=lines,
    fix=fix,
    limits_must_catch=True,
)
