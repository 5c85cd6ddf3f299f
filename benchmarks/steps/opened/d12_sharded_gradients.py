"""ZeRO-2 in small: each rank reduces and owns one slice of the flat gradient."""
from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 3))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.smooth_l1_loss(model(batch["x"]), batch["y"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(18, 5, generator=generator),
        "y": torch.randn(18, 3, generator=generator),
    }


class Partition:
    """Slices of a flat buffer, one for each rank."""

    def __init__(self, numel: int, world: int) -> None:
        self.numel, self.world = numel, world
        self.size = numel // world

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        for owner in range(self.world):
            start = owner * self.size
            yield owner, slice(start, min(start + self.size, self.numel))


class ZeroGradients:
    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.world = dist.get_world_size()
        self.partition = Partition(sum(p.numel() for p in self.parameters), self.world)

    def flatten(self) -> Tensor:
        return torch.cat([p.grad.reshape(-1) for p in self.parameters])

    def reduce(self, flat: Tensor) -> None:
        """Afterwards every owner holds the mean of its slice."""
        for owner, part in self.partition:
            piece = flat[part].contiguous()
            dist.reduce(piece, dst=owner)
            if owner == dist.get_rank():
                flat[part] = piece / self.world

    def gather(self, flat: Tensor) -> None:
        for owner, part in self.partition:
            piece = flat[part].contiguous()
            dist.broadcast(piece, src=owner)
            flat[part] = piece

    def restore(self, flat: Tensor) -> None:
        pieces = flat.split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces):
            parameter.grad.copy_(piece.view_as(parameter))

    def synchronize(self) -> None:
        flat = self.flatten()
        self.reduce(flat)
        self.gather(flat)
        self.restore(flat)


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    zero = ZeroGradients(model)
    loss(model, shard).backward()
    zero.synchronize()


case = Case(model=build, batch=make_batch, loss=loss, layout="1x3")
