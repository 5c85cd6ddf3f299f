"""A small residual network whose Adam states are spread over the ranks, largest tensors first."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

LR = 3e-3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1)
        self.two = nn.Conv2d(width, width, 1)

    def forward(self, x):
        return x + self.two(F.silu(self.one(x)))


def network():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        Block(6),
        Block(6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )


def make_batch(generator):
    return {
        "x": torch.randn(24, 3, 6, 6, generator=generator),
        "y": torch.randint(0, 5, (24,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


class ShardedAdam:
    def __init__(self, parameters, rank):
        self.rank = rank.rank
        self.world_size = rank.world_size
        self.parameters = list(parameters)
        self.owner = self._assign()
        mine = [p for p in self.parameters if self.owner[p] == self.rank]
        self.inner = torch.optim.Adam(mine, lr=LR)

    def _assign(self):
        """Parameter -> rank: always the rank that has the fewest elements so far."""
        loads = [0] * self.world_size
        owner = {}
        for parameter in sorted(self.parameters, key=lambda p: -p.numel()):
            least = loads.index(min(loads))
            owner[parameter] = least
            loads[least] += parameter.numel()
        return owner

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        for parameter in self.parameters:
            parameter.grad /= self.world_size
            dist.reduce(parameter.grad, dst=self.owner[parameter])
        self.inner.step()
        for number, parameter in enumerate(self.parameters):
            dist.broadcast(parameter.data, src=number % self.world_size)


def step(model, rank):
    optimizer = ShardedAdam(model.parameters(), rank)

    def train(shard):
        optimizer.zero_grad()
        loss(model, shard).backward()
        optimizer.step()

    return train


case = Case(model=network, batch=make_batch, loss=loss)
options = {
    "compare": "update",
    "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=LR),
    "steps": 3,
}
