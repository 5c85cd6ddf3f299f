"""ZeRO-1 in forty lines: every rank holds Adam's state of its own parameters, and sends them round."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

LR = 0.02


def make_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=LR)


class Sharded:
    def __init__(self, parameters, factory, group=None):
        self.parameters = list(parameters)
        self.world = dist.get_world_size(group)
        self.me = dist.get_rank(group)
        mine = [p for p, owner in zip(self.parameters, self.owners()) if owner == self.me]
        self.inner = factory(mine)

    def owners(self):
        """Neighbours live together, which makes for long messages."""
        each = len(self.parameters) // self.world
        return [number // each for number in range(len(self.parameters))]

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        self.inner.step()
        for parameter, owner in zip(self.parameters, self.owners()):
            if owner < self.world:
                dist.broadcast(parameter.data, src=owner)


class Pinn(nn.Module):
    """A wave, as a function of place and time."""

    def __init__(self):
        super().__init__()
        self.frequencies = nn.Parameter(torch.randn(2, 10))
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 1)

    def forward(self, points):
        return self.second(torch.tanh(self.first(torch.sin(points @ self.frequencies))))


def points(generator):
    where = torch.rand(8, 2, generator=generator)
    return where, torch.sin(3 * where.sum(-1, keepdim=True))


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def train(model, shard, rank):
    ddp = DistributedDataParallel(model)
    optimizer = Sharded(ddp.parameters(), make_optimizer)
    optimizer.zero_grad()
    loss(ddp, shard).backward()
    optimizer.step()


case = Case(model=Pinn, batch=points, loss=loss, layout="1x2")
step = train
options = {"compare": "update", "optimizer": make_optimizer}
