"""A wrapper or a hook was given too small a group, or a wrong number: the report points there."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddp_equivalence import check
from tests.package.pointed_at import (
    Rows,
    Step,
    checked,
    faulty_lines,
    marked_case,
    mean_loss,
    text_of,
)


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class Meshes:
    """The meshes of a job."""

    def __init__(self, rank: Any) -> None:
        shape = rank.nodes, rank.local_world_size
        self.all = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))

    @property
    def of_a_node(self) -> DeviceMesh:
        return self.all["inner"]


def shards_the_last_on_a_node(model: Any, shard: Rows, rank: Any) -> dict[str, Tensor]:
    meshes = Meshes(rank)
    for layer in list(model)[::2]:
        mesh = meshes.of_a_node if layer is model[-1] else meshes.all
        fully_shard(layer, mesh=mesh)
    sharded: Any = fully_shard(model, mesh=meshes.all)
    mean_loss(sharded, shard).backward()
    return {name: whole(one.grad) for name, one in sharded.named_parameters()}


def shards_all_on_a_node(model: Any, shard: Rows, rank: Any) -> dict[str, Tensor]:
    sharded: Any = fully_shard(model, mesh=Meshes(rank).of_a_node)
    mean_loss(sharded, shard).backward()
    return {name: whole(one.grad) for name, one in sharded.named_parameters()}


TWO_NODES = marked_case("2x2")


def test_the_wrapper_that_got_too_small_a_group_for_some_parameters_is_pointed_at() -> None:
    step: Step = shards_the_last_on_a_node
    verdict = check(TWO_NODES, step)
    assert verdict.outcome == "different"
    where = verdict.localisation.whereabouts
    assert where is not None, verdict
    assert where.headline == "some parameters are reduced in smaller groups", verdict
    assert set(where.parameters) == {"4.weight", "4.bias"}
    assert "fully_shard(layer, mesh=mesh)" in [text_of(one) for one in where.lines if one.is_fault]
    assert "with groups {0, 1} and {2, 3}, not with all 4 ranks" in where.sentence


def test_a_sharding_of_all_parameters_inside_nodes_is_pointed_at() -> None:
    step: Step = shards_all_on_a_node
    verdict = checked(TWO_NODES, step, "nodes_not_reduced")
    assert "sharded: Any = fully_shard(model, mesh=Meshes(rank).of_a_node)" in faulty_lines(verdict)
