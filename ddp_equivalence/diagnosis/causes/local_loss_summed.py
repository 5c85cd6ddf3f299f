"""Each rank's loss is a sum where the big batch's is a mean."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    WrongFactor,
    losses_close,
    losses_of_backwards,
    micro_batches_of_a_rank,
)
from ddp_equivalence.diagnosis.lines.of_loss import line_of_unscaled_loss
from ddp_equivalence.diagnosis.lines.of_reduction import common_factor, line_of_reduction
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.reduced import sum_is_right
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View


def factors(view: View) -> Sequence[WrongFactor]:
    """Every number that the mean may divide by, with and without an average over the ranks.

    Each of them also with an average over the micro-batches of a rank, where it has several.
    """
    if view.parts.add_up_to_the_big_batch:
        return ()
    ranks, details = view.world_size, dict[float, str]()
    for passes in sorted({1, micro_batches_of_a_rank(view)}):
        divided, named = (f" / {passes}", " / micro-batches") if passes > 1 else ("", "")
        for unit, count in view.setting.divisor_candidates.items():
            averaged = f"{count:g} / {ranks}{divided} ({unit} / ranks{named})"
            added = f"{count:g}{divided} ({unit}{named}), and added over the ranks"
            details.setdefault(count / ranks / passes, f"too large by the factor {averaged}")
            details.setdefault(count / passes, f"too large by the factor {added}")
    return tuple(
        WrongFactor(value, detail) for value, detail in details.items() if value not in (0, 1)
    )


def indication(view: View) -> Indication | None:
    """Compares the losses at which backward began with the means over the examples read."""
    pairs = losses_of_backwards(view)
    ratios = [value / own for value, own in pairs or () if own]
    if ratios and all(losses_close(ratio, 1.0) for ratio in ratios):
        return Indication(False, "backward began at the mean over the rank's own examples")
    if _losses_make_up_the_big_batch(view):
        return Indication(False, "the losses at which backward began make up the big batch's")
    if sum_is_right(view):
        return Indication(False, "the sum of what the ranks computed is the big batch's gradient")
    return None


def _losses_make_up_the_big_batch(view: View) -> bool:
    """True if the ranks' losses add up to the big batch's, or if their mean is this."""
    if not view.observed.covers_every_rank:
        return False
    by_rank = [
        [call.loss for call in view.observed.backwards(rank)] for rank in view.observed.by_rank
    ]
    if any(None in one or not one for one in by_rank):
        return False
    total = sum(one for of_rank in by_rank for one in of_rank if one is not None)
    right = view.examples.big_batch_loss
    return losses_close(total, right) or losses_close(total / view.world_size, right)


def lines(view: View) -> Sequence[PointedLine]:
    """Where the loss is made, and where its gradients are reduced."""
    factor = common_factor(view)
    note = "a sum, not a mean" + (f": {text_of(factor, '.6g')} times too large" if factor else "")
    return in_order(view, line_of_unscaled_loss(view, note, True), line_of_reduction(view))


def fix(view: View) -> str:
    """Take the mean."""
    return 'take the mean over the rank\'s own examples: reduction="mean", not "sum".'


HYPOTHESIS = Hypothesis(
    name="local_loss_summed",
    sentence="Each rank's loss is the sum over its own examples; the big batch's is their mean.",
    look_at='the reduction of the loss: "sum" where "mean" is meant, or a mean in some places only',
    factors=factors,
    indication=indication,
    tell_apart="Use another number of examples: no other cause has a factor that changes with it.",
    headline="the loss is summed, not averaged",
    lines=lines,
    fix=fix,
)
