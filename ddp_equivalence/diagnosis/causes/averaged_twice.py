"""Gradients were divided by the number of ranks once more than needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    WrongFactor,
)
from ddp_equivalence.diagnosis.indications import every_loss_is_the_big_batch_loss
from ddp_equivalence.diagnosis.lines.lines_in_order import in_order
from ddp_equivalence.diagnosis.lines.lines_of_reduction import (
    averages,
    by_hand,
    in_hook,
    line_of_reduction,
    line_that_scales_gradients,
)
from ddp_equivalence.diagnosis.lines.loss_lines import line_that_scales_loss
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.backward_alone import backward_alone_is_wrong


def predict(view: View) -> Sequence[Prediction]:
    """The big batch, or the mean of what the ranks contribute, divided by the world size."""
    if view.world_size == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    means = [view.expected]
    contributions = view.parts.contributions()
    if contributions is not None:
        means.append(contributions.mean(0))
    return tuple(Prediction(view.on_every_rank(mean / view.world_size)) for mean in means)


def factors(view: View) -> Sequence[WrongFactor]:
    """One over the world size, where the ranks' gradients should be averaged once."""
    if view.world_size == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    detail = f"divided by {view.world_size}, the number of ranks, once more"
    return (WrongFactor(1 / view.world_size, detail),)


def indication(view: View) -> Indication | None:
    """Speaks against this cause if a loss over gathered outputs, or backward, has the factor."""
    if every_loss_is_the_big_batch_loss(view) and view.observed.a_rank_gathered:
        because = "every rank's loss is that of the whole batch, which explains the factor"
        return Indication(False, because)
    if backward_alone_is_wrong(view):
        because = "the ranks hold the mean of what they computed, and began at the right losses"
        return Indication(False, because)
    return None


def lines(view: View) -> Sequence[PointedLine]:
    """Where the gradients are averaged, and where they or the loss are divided once more."""
    count = view.world_size
    loss = line_that_scales_loss(view, 1 / count)
    gradients = line_that_scales_gradients(view, 1 / count)
    if averages(view) or loss is None or gradients is None:
        again = gradients or loss
        return in_order(view, line_of_reduction(view, is_fault=again is None), again)
    return in_order(view, replace(loss, is_fault=False), line_of_reduction(view), gradients)


def fix(view: View) -> str:
    """Divide once."""
    count = view.world_size
    loss = line_that_scales_loss(view, 1 / count)
    gradients = line_that_scales_gradients(view, 1 / count)
    what = "the gradients" if gradients is not None else "the loss"
    if averages(view) and (loss or gradients):
        who = "DDP averages" if not by_hand(view) else "ReduceOp.AVG averages"
        return f"do not divide {what} by {count}: {who} over the {count} ranks already."
    if in_hook(view) and not by_hand(view):
        return f"divide by {count}, the number of ranks, once in the hook."
    return f"divide by {count}, the number of ranks, once: in the loss or after the reduction."


HYPOTHESIS = Hypothesis(
    name="averaged_twice",
    sentence="Gradients were divided by the number of ranks once too often.",
    look_at="a division by the world size in the loss or after backward: DDP already averages",
    predict=predict,
    factors=factors,
    indication=indication,
    tell_apart="Use another world size: no other cause has a factor that changes with it.",
    headline="gradients are averaged over ranks twice",
    lines=lines,
    fix=fix,
    limits_must_catch=True,
)
