"""A step may leave gradients that are sharded over the ranks, as FSDP2 does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case, check


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(8, 5, generator=generator),
        torch.randn(8, 3, generator=generator),
    )


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


CASE = Case(model=build, batch=rows, loss=loss, layout="1x2")


def shard_once(model: Any, rank: Any) -> None:
    if not any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        mesh = init_device_mesh("cpu", (rank.world_size,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


def leaves_shards(model: Any, shard: Any, rank: Any) -> None:
    shard_once(model, rank)
    loss(model, shard).backward()


def returns_shards(model: Any, shard: Any, rank: Any) -> dict[str, Any]:
    leaves_shards(model, shard, rank)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def forgets_the_mean(model: Any, shard: Any, rank: Any) -> None:
    shard_once(model, rank)
    (loss(model, shard) * rank.world_size).backward()


def trains(model: Any, shard: Any, rank: Any) -> None:
    leaves_shards(model, shard, rank)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    ("step", "outcome"),
    [(leaves_shards, "same"), (returns_shards, "same"), (forgets_the_mean, "different")],
)
def test_sharded_gradients_are_gathered_and_compared(step: Any, outcome: str) -> None:
    assert check(CASE, step).outcome == outcome


@pytest.mark.parametrize(("step", "outcome"), [(trains, "same"), (forgets_the_mean, "different")])
def test_sharded_weights_are_gathered_and_compared(step: Any, outcome: str) -> None:
    assert check(CASE, step, compare="update").outcome == outcome


def test_sharded_gradients_of_several_steps_are_compared() -> None:
    verdict = check(CASE, leaves_shards, steps=2)
    assert verdict.outcome == "same", str(verdict)
