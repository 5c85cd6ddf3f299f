"""A sum-reduced loss, averaged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Factor, Hypothesis, Way
from ddp_equivalence.diagnosis.view import View, near


def predict(view: View) -> Sequence[Way]:
    found, total, constant = view.contributions(), view.total(), view.constant()
    if found is None or total is None or view.part_count == 1:
        return ()
    data = total if constant is None else total - view.part_count * constant
    whole = data if constant is None else data + constant
    # The parts of a sum add up to the big batch, but for a term that does not depend on the data.
    adds_up = near(total, view.expected)  # all data on one rank may be a mean as well
    if not (adds_up or (constant is not None and near(whole, view.expected))):
        return ()
    mean = Way(view.everywhere(found.mean(0)))
    if view.layout.nodes == 1:
        return (mean,)
    # Summed inside the nodes and averaged between them.
    between_nodes = whole - data * (1 - 1 / view.layout.nodes)
    return mean, Way(view.everywhere(between_nodes), "between the nodes")


def factors(view: View) -> Sequence[Factor]:
    if view.world_size == 1 or not view.is_sum():
        return ()
    return (Factor(1 / view.world_size, f"divided by the {view.world_size} ranks"),)


HYPOTHESIS = Hypothesis(
    name="mean_not_sum",
    sentence="The loss is a sum over examples, and the gradients were averaged over the ranks.",
    look_at="the loss's reduction: multiply a sum-reduced loss by the world size under DDP",
    predict=predict,
    factors=factors,
    tell_apart="another world size: only this factor follows it",
    of_the_rule=True,
)
