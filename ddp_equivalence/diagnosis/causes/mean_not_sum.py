"""The loss is a sum over examples, and gradients were averaged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.factors_of_ranks import also_on_one_rank
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction, WrongFactor
from ddp_equivalence.diagnosis.lines.of_loss import line_of_loss
from ddp_equivalence.diagnosis.lines.of_reduction import (
    by_hand,
    in_hook,
    is_unseen,
    line_of_reduction,
    line_that_scales,
    line_that_scales_gradients,
)
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The mean of parts that add up to the big batch, over all ranks or only over the nodes."""
    contributions, total = view.parts.contributions(), view.parts.total()
    if contributions is None or total is None or view.parts.count == 1:
        return ()
    # Every part has the gradient of the data-independent terms; the big batch has it only once.
    constant = view.examples.data_independent_gradient()
    data = total if constant is None else total - view.parts.count * constant
    big_batch = data if constant is None else data + constant
    # Unlike add_up_to_the_big_batch, this also holds if one part has all the data.
    adds_up = nearly_equal(total, view.expected) and _is_a_sum(view)
    adds_up_but_for_constant = constant is not None and nearly_equal(big_batch, view.expected)
    if not adds_up and not adds_up_but_for_constant:
        return ()
    mean_of_ranks = Prediction(view.on_every_rank(contributions.mean(0)))
    nodes = view.setting.layout.nodes
    if nodes == 1:
        return (mean_of_ranks,)
    summed_in_nodes = big_batch - data * (1 - 1 / nodes)
    averaged_between_nodes = Prediction(
        view.on_every_rank(summed_in_nodes), "averaged only between the nodes"
    )
    return mean_of_ranks, averaged_between_nodes


def _is_a_sum(view: View) -> bool:
    """True if the parts add up because the loss is a sum, not because only one part has any data.

    Of a mean, a part that has all the data is the big batch too; but its halves do not add up.
    """
    if view.parts.add_up_to_the_big_batch:
        return True
    parts = [part for of_rank in view.parts.by_rank or () for part in of_rank]
    with_data = [part for part in parts if bool(view.examples.gradient(part).any())]
    return all(
        len(part) < 2
        or nearly_equal(
            view.examples.gradient(part[: len(part) // 2])
            + view.examples.gradient(part[len(part) // 2 :]),
            view.examples.gradient(part),
        )
        for part in with_data
    )


def factors(view: View) -> Sequence[WrongFactor]:
    """One over the world size, where the ranks' losses should be added up."""
    if view.world_size == 1 or not view.parts.add_up_to_the_big_batch:
        return ()
    return (WrongFactor(1 / view.world_size, f"divided by {view.world_size}, the number of ranks"),)


def indication(view: View) -> Indication | None:
    """Speaks against this cause if one rank, which has nothing to average, leaves the factor."""
    return also_on_one_rank(view, 1 / view.world_size)


def lines(view: View) -> Sequence[PointedLine]:
    """Where the loss is summed, and where the gradients are averaged."""
    count = view.world_size
    divided = line_that_scales(view, 1 / count)
    if divided is not None:
        return in_order(view, line_of_reduction(view), divided)
    if by_hand(view) or in_hook(view):
        return in_order(view, line_of_loss(view), line_of_reduction(view, is_fault=True))
    loss = line_of_loss(view, "a sum over examples", True, f"a multiplication by {count}", True)
    return in_order(view, loss, line_of_reduction(view))


def fix(view: View) -> str:
    """Add the gradients up, or undo the average."""
    count = view.world_size
    if line_that_scales_gradients(view, 1 / count) is not None:
        return f"do not divide the gradients by {count}: those of a summed loss add up."
    if line_that_scales(view, 1 / count) is not None:
        return f"do not divide the loss by {count}: the gradients of a summed loss add up."
    if is_unseen(view):
        return f"add the gradients up, or multiply the loss by {count} where they are averaged."
    if by_hand(view) or in_hook(view):
        return f"add the gradients of the {count} ranks up (ReduceOp.SUM), and do not divide them."
    return f"multiply the summed loss by {count} before backward: DDP averages over {count} ranks."


HYPOTHESIS = Hypothesis(
    name="mean_not_sum",
    sentence="The loss is a sum over examples, and the gradients were averaged over the ranks.",
    look_at="the reduction of the loss: under DDP, multiply a summed loss by the world size",
    predict=predict,
    factors=factors,
    indication=indication,
    tell_apart="Use another world size: no other cause has a factor that changes with it.",
    headline="a summed loss is averaged over ranks",
    lines=lines,
    fix=fix,
    limits_must_catch=True,
)
