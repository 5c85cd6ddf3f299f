"""ZeRO-like reduction: a gradient is averaged on the rank that owns it, then handed to the rest."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, Rank


def reward_model() -> nn.Sequential:
    torch_layers: list[nn.Module] = [nn.Linear(6, 10), nn.LeakyReLU(), nn.Linear(10, 10), nn.LeakyReLU()]
    return nn.Sequential(*torch_layers, nn.Linear(10, 1, bias=False))


def comparisons(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "better": torch.randn(12, 6, generator=generator) + 0.3,
        "worse": torch.randn(12, 6, generator=generator),
        "margin": torch.rand(12, generator=generator),
    }


def bradley_terry(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    gap = (model(batch["better"]) - model(batch["worse"])).squeeze(-1)
    return nn.functional.softplus(batch["margin"] - gap).mean()


case = Case(model=reward_model, batch=comparisons, loss=bradley_terry, layout="1x3")


def assign_owners(sizes: list[int], world: int) -> list[int]:
    """The rank that owns each tensor: the biggest first, always to the least loaded rank."""
    load = [0] * world
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += sizes[i]
    return owners


class ShardedReducer:
    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.owners = assign_owners([p.numel() for p in params], self.world)

    def reduce_scatter(self) -> None:
        for p, owner in zip(self.params, self.owners):
            dist.reduce(p.grad, dst=owner)
            if owner == self.rank:
                p.grad.div_(self.world)

    def all_gather(self) -> None:
        # Small tensors first: they are needed first in the next forward.
        order = sorted(range(len(self.params)), key=lambda i: self.params[i].numel())
        for i, owner in zip(order, self.owners):
            dist.broadcast(self.params[i].grad, src=owner)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    bradley_terry(model, shard).backward()
    reducer = ShardedReducer(list(model.parameters()))
    reducer.reduce_scatter()
    reducer.all_gather()
