"""What all ranks of a node computed is in no other node's gradient."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes import rank_left_out
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    if view.layout.nodes == 1:
        return ()
    left_out = set(rank_left_out.candidates(view))
    found = []
    for node in range(view.layout.nodes):
        ranks = view.layout.ranks_on(node)
        if ranks in left_out:
            for way in rank_left_out.without(view, ranks):
                found.append(Way(way.predicted, f"node {node}, {way.detail}"))
    return tuple(found)


HYPOTHESIS = Hypothesis(
    name="node_left_out",
    sentence="What a node computed is in no other node's gradient.",
    look_at="the process group between the nodes, and which rank of a node speaks for it",
    predict=predict,
    tell_apart="more than one rank on every node",
)
