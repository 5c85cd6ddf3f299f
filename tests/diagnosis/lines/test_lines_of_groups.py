"""A wrapper or a hook was given too small a group, or a wrong number: the report points there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddp_equivalence import check
from tests.diagnosis.lines import steps_with_groups as steps
from tests.diagnosis.lines.faulty_line import case, checked, faults, text_of

Step = Callable[..., Any]

TWO_NODES = case("2x2")


def test_the_wrapper_that_got_too_small_a_group_for_some_parameters_is_pointed_at() -> None:
    step: Step = steps.shards_the_last_on_a_node
    verdict = check(TWO_NODES, step)
    assert verdict.outcome == "different"
    where = verdict.localisation.whereabouts
    assert where is not None, verdict
    assert where.headline == "some parameters are reduced in smaller groups", verdict
    assert set(where.parameters) == {"4.weight", "4.bias"}
    assert "fully_shard(layer, mesh=mesh)" in [text_of(one) for one in where.lines if one.is_fault]
    assert "with groups {0, 1} and {2, 3}, not with all 4 ranks" in where.sentence


def test_a_sharding_of_all_parameters_inside_nodes_is_pointed_at() -> None:
    step: Step = steps.shards_all_on_a_node
    verdict = checked(TWO_NODES, step, "nodes_not_reduced")
    assert "sharded = fully_shard(model, mesh=Meshes(rank).of_a_node)" in faults(verdict)
