"""Partitioned gradients (ZeRO, stage 2): each rank owns a slice of the flat gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

FEATURES, WIDTH, OUTPUTS, EXAMPLES = 6, 9, 4, 18


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        Residual(WIDTH),
        Residual(WIDTH),
        nn.Linear(WIDTH, OUTPUTS),
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.huber_loss(model(batch["x"]), batch["y"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "y": torch.randn(EXAMPLES, OUTPUTS, generator=generator),
    }


class Partition:
    """Which elements of a flat tensor belong to which rank."""

    def __init__(self, elements: int, world: int) -> None:
        self.elements, self.world = elements, world
        self.shard = elements // world

    def bounds(self, owner: int) -> slice:
        start = owner * self.shard
        return slice(start, min(start + self.shard, self.elements))


class PartitionedOptimizerState:
    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.sizes = [p.numel() for p in self.parameters]
        self.partition = Partition(sum(self.sizes), self.world)

    def flatten(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.parameters])

    def reduce_to_owners(self, flat: Tensor) -> None:
        flat.div_(self.world)
        for owner in range(self.world):
            dist.reduce(flat[self.partition.bounds(owner)], dst=owner)

    def collect_from_owners(self, flat: Tensor) -> None:
        for owner in range(self.world):
            dist.broadcast(flat[self.partition.bounds(owner)], src=owner)

    def synchronise(self) -> None:
        flat = self.flatten()
        self.reduce_to_owners(flat)
        self.collect_from_owners(flat)
        for parameter, piece in zip(self.parameters, flat.split(self.sizes)):
            parameter.grad.copy_(piece.view_as(parameter))


class Engine:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.state = PartitionedOptimizerState(model)

    def backward(self, value: Tensor) -> None:
        value.backward()
        self.state.synchronise()


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x3")


def step(model, shard, rank):
    engine = Engine(model)
    engine.backward(loss(model, shard))
