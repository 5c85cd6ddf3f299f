"""The mean over nodes of node means that divide by different numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_equivalence.diagnoses.hypothesis import Hypothesis, View, near


def predict(view: View) -> Sequence[Tensor]:
    if view.parts is None or view.layout.nodes == 1 or view.is_sum():
        return ()
    nodes = [
        view.gradient(
            tuple(
                index
                for rank in view.layout.ranks_on(node)
                for part in view.parts[rank]
                for index in part
            )
        )
        for node in range(view.layout.nodes)
    ]
    mean = torch.stack(nodes).mean(0)
    return () if near(mean, view.expected) else (view.everywhere(mean),)


HYPOTHESIS = Hypothesis(
    name="mean_of_node_means",
    sentence="The nodes hold different amounts of data, and the means of the nodes count equally.",
    look_at="the average between nodes: weight it by what each node's loss divides by",
    predict=predict,
)
