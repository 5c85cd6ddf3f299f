"""The mean over nodes of node means that divide by different numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Way
from ddp_equivalence.diagnosis.view import View, near


def predict(view: View) -> Sequence[Way]:
    found = view.contributions()
    if view.parts is None or found is None or view.layout.nodes == 1 or view.is_sum():
        return ()
    nodes = [view.layout.ranks_on(node) for node in range(view.layout.nodes)]
    as_one = [
        view.gradient(tuple(i for rank in ranks for part in view.parts[rank] for i in part))
        for ranks in nodes
    ]
    if max(map(len, nodes)) == 1:
        return ()  # these are ranks
    rules = [(as_one, "")]
    if len({len(ranks) for ranks in nodes}) > 1:
        for own in view.owns:
            of_ranks = [own[list(ranks)].mean(0) for ranks in nodes]
            rules.append((of_ranks, "the mean of each node's ranks, then the mean of the nodes"))
    ways = []
    for means, detail in rules:
        mean = torch.stack(means).mean(0)
        if not near(mean, view.expected):
            ways.append(Way(view.everywhere(mean), detail))
    return tuple(ways)


HYPOTHESIS = Hypothesis(
    name="mean_of_node_means",
    sentence="The nodes hold different amounts of data, and the means of the nodes count equally.",
    look_at="the average between nodes: weight it by what each node's loss divides by",
    predict=predict,
    tell_apart="nodes with several ranks, and as many ranks on each: only this one then goes away",
    of_the_rule=True,
)
