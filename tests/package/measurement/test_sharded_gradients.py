"""A step may leave weights and gradients that are sharded over the ranks. They are read whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ddp_equivalence import Case, check

KEPT = "_wrapped_before"


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 3))


def rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 5, generator=generator), torch.randn(16, 3, generator=generator)


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


CASE = Case(model=build, batch=rows, loss=loss, layout="1x2")


def fsdp2(model: Any, rank: Any) -> Any:
    mesh = init_device_mesh("cpu", (rank.world_size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hybrid(model: Any, rank: Any) -> Any:
    mesh = init_device_mesh("cpu", (rank.nodes, rank.local_world_size), mesh_dim_names=("a", "b"))
    return fully_shard(model, mesh=mesh)


def composable_ddp(model: Any, rank: Any) -> Any:
    return replicate(model)


def fsdp1(model: Any, rank: Any, *, originals: bool, inside: bool) -> Any:
    return FullyShardedDataParallel(
        model,
        use_orig_params=originals,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}) if inside else None,
        device_id=torch.device("cpu"),
    )


WRAPPERS: dict[str, Callable[[Any, Any], Any]] = {
    "fully_shard": fsdp2,
    "replicate": composable_ddp,
    "views": partial(fsdp1, originals=True, inside=True),
    "flat": partial(fsdp1, originals=False, inside=True),
    "one_flat": partial(fsdp1, originals=False, inside=False),
}


def wrapped(wrap: Callable[[Any, Any], Any], model: Any, rank: Any) -> Any:
    """The model in its wrapper, which is made in the first step."""
    if KEPT not in model.__dict__:
        model.__dict__[KEPT] = wrap(model, rank)
    return model.__dict__[KEPT]


def step_with(wrap: Callable[[Any, Any], Any], how: str = "") -> Any:
    def step(model: Any, shard: Any, rank: Any) -> Any:
        net = wrapped(wrap, model, rank)
        value = loss(net, shard)
        if how == "sums":
            value = value * rank.world_size
        if how == "triples":
            value = value * 3
        value.backward()
        if how == "evaluates":  # FSDP leaves the weights gathered after a forward pass
            with torch.no_grad():
                net(shard[0])
        if how == "returns":
            return {name: one.grad for name, one in net.named_parameters()}
        return None

    return step


def trains_with(wrap: Callable[[Any, Any], Any], factor: float = 1.0) -> Any:
    def trains(model: Any, shard: Any, rank: Any) -> None:
        net = wrapped(wrap, model, rank)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for inputs, targets in zip(*(leaf.chunk(2) for leaf in shard), strict=True):
            optimizer.zero_grad()
            (factor * loss(net, (inputs, targets))).backward()
            optimizer.step()

    return trains


@pytest.mark.parametrize("name", WRAPPERS)
def test_gradients_of_several_steps_are_read_whole(name: str) -> None:
    verdict = check(CASE, step_with(WRAPPERS[name]), steps=2)
    assert verdict.outcome == "same", str(verdict)


@pytest.mark.parametrize("name", WRAPPERS)
def test_updates_of_several_steps_are_read_whole(name: str) -> None:
    verdict = check(CASE, trains_with(WRAPPERS[name]), compare="update", steps=2)
    assert verdict.outcome == "same", str(verdict)


@pytest.mark.parametrize(
    ("name", "how"), [("fully_shard", "returns"), ("views", "evaluates"), ("flat", "returns")]
)
def test_what_is_returned_or_gathered_again_is_read_whole(name: str, how: str) -> None:
    verdict = check(CASE, step_with(WRAPPERS[name], how=how), steps=2)
    assert verdict.outcome == "same", str(verdict)


@pytest.mark.parametrize("name", ["fully_shard", "flat"])
def test_a_sum_of_the_ranks_is_named_as_under_ddp(name: str) -> None:
    verdict = check(CASE, step_with(WRAPPERS[name], how="sums"))
    assert (verdict.outcome, verdict.cause) == ("different", "sum_not_mean"), str(verdict)


def test_a_step_that_is_wrong_on_one_rank_too_is_run_on_one() -> None:
    verdict = check(CASE, step_with(WRAPPERS["flat"], how="triples"))
    assert (verdict.outcome, verdict.cause) == ("different", None), str(verdict)
    assert "On one rank " in str(verdict)


def test_a_wrong_update_differs() -> None:
    verdict = check(CASE, trains_with(WRAPPERS["flat"], factor=2.0), compare="update", steps=2)
    assert verdict.outcome == "different"


def test_the_evidence_has_no_collective_of_the_suite() -> None:
    """Between two steps the suite reads all weights, which takes collectives of its own."""
    step = step_with(WRAPPERS["one_flat"])
    one, two = (check(CASE, step, steps=steps).evidence[0].collectives for steps in (1, 2))
    assert one is not None
    assert two is not None
    more = Counter(call.op for call in two) - Counter(call.op for call in (*one, *one))
    assert not more


@pytest.mark.parametrize(("how", "outcome"), [("", "same"), ("sums", "different")])
def test_a_mesh_of_two_dimensions_is_read_whole(how: str, outcome: str) -> None:
    case = Case(model=build, batch=rows, loss=loss, layout="2x2")
    assert check(case, step_with(hybrid, how), steps=2).outcome == outcome


def tensor_and_data_parallel(model: Any, whole: Any, rank: Any) -> None:
    mesh = init_device_mesh("cpu", (rank.nodes, rank.local_world_size), mesh_dim_names=("d", "t"))
    plan = {"2": ColwiseParallel(), "4": RowwiseParallel()}
    parallelize_module(model, mesh["t"], plan)
    fully_shard(model, mesh=mesh["d"])
    own = tuple(leaf.chunk(rank.nodes)[rank.node] for leaf in whole)
    loss(model, own).backward()


def test_shards_of_tensor_parallelism_are_read_whole() -> None:
    case = Case(model=build, batch=rows, loss=loss, layout="2x2", shards="own")
    verdict = check(case, tensor_and_data_parallel)
    assert verdict.outcome == "same", str(verdict)
