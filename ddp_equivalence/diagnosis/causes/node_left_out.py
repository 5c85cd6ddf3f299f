"""The gradients of the ranks of a node are missing from those of all other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.causes.rank_left_out import (
    predictions_without,
    ranks_that_may_be_left_out,
    ranks_without_weight,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction
from ddp_equivalence.diagnosis.lines.of_gradients import fix_of_left_out, lines_of_left_out
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The gradients without the ranks of each node that may be left out."""
    nodes = view.setting.ranks_by_node
    if len(nodes) == 1:
        return ()
    left_out = ranks_that_may_be_left_out(view)
    return tuple(
        replace(prediction, detail=f"node {node}: {prediction.detail}")
        for node, ranks in enumerate(nodes)
        if ranks in left_out
        for prediction in predictions_without(view, ranks)
    )


def lines(view: View) -> Sequence[PointedLine]:
    """Where these ranks' gradients are lost."""
    return lines_of_left_out(view, ranks_without_weight(view))


def fix(view: View) -> str:
    """Reduce the gradients of all ranks."""
    return fix_of_left_out(view, ranks_without_weight(view))


HYPOTHESIS = Hypothesis(
    name="node_left_out",
    sentence="The gradients that the ranks of a node computed are missing from the gradients of "
    "all other nodes.",
    look_at="the process group between the nodes, and the rank of each node that belongs to it",
    predict=predict,
    tell_apart="Use more than one rank on every node.",
    headline="a node's gradients are missing everywhere else",
    lines=lines,
    fix=fix,
)
