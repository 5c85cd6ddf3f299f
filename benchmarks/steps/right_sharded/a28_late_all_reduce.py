"""HSDP with gradient accumulation: reduce-scatter after every micro-batch, all-reduce once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ddp_equivalence import Case

ACCUMULATE = 3


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 14), nn.Tanh(), nn.Linear(14, 14), nn.Tanh(), nn.Linear(14, 3)
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().sum(dim=1).mean()


def batch_of_pairs(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(24, 5, generator=generator)
    return inputs, inputs.cumsum(dim=1)[:, 2:]


@contextmanager
def inside_node_only(model: FSDPModule, enabled: bool) -> Iterator[None]:
    """Gradients are still reduced over the shard group, but not over the replicas."""
    model.set_requires_all_reduce(not enabled)
    try:
        yield
    finally:
        model.set_requires_all_reduce(True)


def hybrid_shard(model: nn.Sequential, nodes: int, ranks: int) -> FSDPModule:
    mesh = init_device_mesh("cpu", (nodes, ranks // nodes), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module, shard: tuple[Tensor, Tensor], rank) -> None:
    sharded = hybrid_shard(model, rank.nodes, rank.world_size)
    inputs, targets = shard
    micros = list(zip(inputs.chunk(ACCUMULATE), targets.chunk(ACCUMULATE)))
    for index, micro in enumerate(micros):
        last = index == len(micros) - 1
        sharded.set_is_last_backward(last)
        with inside_node_only(sharded, enabled=not last):
            (loss(sharded, micro) / len(micros)).backward()


case = Case(model=build_model, batch=batch_of_pairs, loss=loss, layout="2x2")
