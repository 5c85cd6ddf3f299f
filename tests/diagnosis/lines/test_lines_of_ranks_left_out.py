"""A report about ranks or nodes whose gradients are missing or weighted wrongly points at the line
where these are lost.
"""

from __future__ import annotations

from functools import partial

import pytest

from ddp_equivalence import Case
from tests.diagnosis.lines import steps_that_leave_out as steps
from tests.diagnosis.lines.faulty_line import Step, case, checked, faults, notes, rows

ONE_NODE = case()
TWO_NODES = case("2x2")
THREE_NODES = case("3x2", batch=partial(rows, count=18))
UNEVEN_NODES = case("1+3")

LEFT_OUT = [
    (
        ONE_NODE,
        steps.cleared_on_one_rank,
        "rank_left_out",
        "model.zero_grad(set_to_none=False)",
        "clears gradients on rank 2",
        "keep the gradients of rank 2, and divide by 4.",
    ),
    (
        ONE_NODE,
        steps.skips_its_backward,
        "rank_left_out",
        "loss = loss * 0",
        "only rank 1 came here",
        "let rank 1 compute the gradient of the examples given there.",
    ),
    (
        ONE_NODE,
        steps.weighs_one_rank_with_zero,
        "rank_left_out",
        "loss = weight * loss",
        "the gradient of rank 3 is zero",
        "let rank 3 compute the gradient of the examples given there.",
    ),
    (
        ONE_NODE,
        steps.returns_early,
        "rank_left_out",
        "workers = dist.new_group([0, 1, 2])",
        "dist.all_reduce(parameter.grad, group=workers)  reduces without rank 3",
        "let rank 3 take part in an all_reduce of all 4 ranks, and divide by 4.",
    ),
    (
        ONE_NODE,
        steps.ddp_in_a_smaller_group,
        "rank_left_out",
        "workers = dist.new_group([0, 1, 2])",
        "",
        "let rank 3 take part in an all_reduce of all 4 ranks, and divide by 4.",
    ),
    (
        TWO_NODES,
        steps.node_group_lacks_a_rank,
        "rank_left_out",
        "inside = [dist.new_group(ranks) for ranks in ([0, 1], [2])]",
        "dist.all_reduce(parameter.grad, group=inside[rank.node])  reduces without rank 3",
        "let rank 3 take part in an all_reduce of all 4 ranks, and divide by 4.",
    ),
    (
        TWO_NODES,
        steps.a_node_clears,
        "node_left_out",
        "parameter.grad.zero_()",
        "clears gradients on ranks 2, 3",
        "keep the gradients of ranks 2, 3, and divide by 4.",
    ),
    (
        THREE_NODES,
        steps.leaders_forget_a_node,
        "node_left_out",
        "leaders = dist.new_group([ranks[0] for ranks in nodes[:2]])",
        "dist.all_reduce(parameter.grad, group=leaders)  reduces without ranks 4, 5",
        "let ranks 4, 5 take part in an all_reduce of all 6 ranks, and divide by 6.",
    ),
    (
        UNEVEN_NODES,
        steps.averages_nodes_equally,
        "mean_of_node_means",
        "dist.all_reduce(gradient, group=self.across)",
        "joins the nodes, which hold 4 and 12 examples",
        "weight the nodes by their examples, 4/16 and 12/16, not by 1/2 each.",
    ),
]


@pytest.mark.parametrize(("given", "step", "cause", "line", "note", "fix"), LEFT_OUT)
def test_the_line_that_loses_gradients_of_ranks_is_pointed_at(
    given: Case, step: Step, cause: str, line: str, note: str, fix: str
) -> None:
    verdict = checked(given, step, cause)
    assert (faults(verdict), verdict.findings[0].fix) == ([line], fix)
    assert note in notes(verdict)


def test_a_rank_outside_the_group_of_the_others_is_not_said_to_have_reduced_anything() -> None:
    verdict = checked(ONE_NODE, steps.group_without_the_last, "rank_left_out")
    assert faults(verdict) == ["others = dist.new_group(list(range(rank.world_size - 1)))"]
    assert "rank 3 reduced" not in verdict.full_report()
