"""The mean of the nodes' means, which divide by different numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.divisors import counts_of_parts, is_weighted_mean
from ddp_equivalence.diagnosis.examples_read import is_divided_up
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind


def predict(view: View) -> Sequence[Prediction]:
    """The mean of the nodes' means, with the ranks of a node taken together or averaged."""
    nodes = view.setting.ranks_by_node
    if view.parts.by_rank is None or len(nodes) == 1 or view.parts.add_up_to_the_big_batch:
        return ()
    sizes = {len(ranks) for ranks in nodes}
    if max(sizes) == 1:
        return ()  # Every node has one rank, which is left to other causes.
    if is_divided_up(view) is False:
        return ()  # The nodes hold no parts of the batch.
    candidates = []
    if _amounts(view) is not None or isinstance(view.setting.case.loss, str):
        means = [view.examples.gradient(examples) for examples in _examples_of_nodes(view)]
        candidates = [(torch.stack(means).mean(0), "")]
    if len(sizes) > 1:
        detail = "the mean of each node's ranks, then the mean of the nodes"
        for local in view.local_gradients:
            means = [local[list(ranks)].mean(0) for ranks in nodes]
            candidates.append((torch.stack(means).mean(0), detail))
    return tuple(
        Prediction(view.on_every_rank(mean), detail)
        for mean, detail in candidates
        if not nearly_equal(mean, view.expected)
    )


def lines(view: View) -> Sequence[PointedLine]:
    """Where gradients are reduced inside the nodes, and between them."""
    node_of = {
        rank: node for node, ranks in enumerate(view.setting.ranks_by_node) for rank in ranks
    }
    between: list[CallSite] = []
    inside: list[CallSite] = []
    for place in view.observed.calls.reductions:
        joins = any(len({node_of[rank] for rank in group}) > 1 for group in place.groups)
        (between if joins else inside).append(place)
    pointed = [place.pointed("reduces inside each node") for place in inside[-1:]]
    note = f"joins the nodes, which hold {_sizes_text(view)}"
    pointed += [place.pointed(note, is_fault=True) for place in between[-1:]]
    if not between:
        pointed += [
            place.pointed(note, is_fault=True)
            for place in view.observed.calls.places(Kind.WRAP)[:1]
        ]
    return pointed


def _examples_of_nodes(view: View) -> list[tuple[int, ...]]:
    shards = view.parts.examples_by_rank
    return [
        tuple(index for rank in ranks for index in shards[rank])
        for ranks in view.setting.ranks_by_node
    ]


def _amounts(view: View) -> tuple[str, list[float]] | None:
    """How much each node holds of what the big batch divides by, in which unit.

    None if all nodes hold equally much of it, or if it is not known.
    """
    parts = _examples_of_nodes(view)
    for unit, counts in counts_of_parts(view, parts).items():
        if sum(counts) > 0 and min(counts) >= 0 and is_weighted_mean(view, parts, counts):
            return (unit, counts) if max(counts) > min(counts) else None
    return None


def _held_by_nodes(view: View) -> tuple[str, list[float]]:
    """The same; where it is not known, the numbers of ranks, by which the nodes then differ."""
    ranks = [float(len(ranks)) for ranks in view.setting.ranks_by_node]
    return _amounts(view) or ("ranks", ranks)


def _sizes_text(view: View) -> str:
    unit, counts = _held_by_nodes(view)
    return f"{' and '.join(f'{count:g}' for count in counts)} {unit}"


def fix(view: View) -> str:
    """Weight the nodes."""
    unit, counts = _held_by_nodes(view)
    weights = " and ".join(f"{count:g}/{sum(counts):g}" for count in counts)
    return f"weight the nodes by their {unit}, {weights}, not by 1/{len(counts)} each."


HYPOTHESIS = Hypothesis(
    name="mean_of_node_means",
    sentence="The nodes hold different amounts of data, and the means of the nodes count equally.",
    look_at="the average between nodes: weight each node by the number that its loss divides by",
    predict=predict,
    tell_apart="Use nodes with several ranks, and equally many on each: only this difference then "
    "goes away.",
    headline="node means count equally, nodes differ",
    lines=lines,
    fix=fix,
    limits_must_catch=True,
)
