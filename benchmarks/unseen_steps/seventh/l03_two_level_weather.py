"""Weather downscaling on nodes that have not all the same number of workers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

NODES = ((0,), (1, 2, 3))


def build():
    return nn.Sequential(
        nn.Conv1d(2, 6, 3, padding=1), nn.SiLU(), nn.Conv1d(6, 1, 3, padding=1)
    )


def fields(generator):
    coarse = torch.randn(16, 2, 10, generator=generator)
    fine = coarse.sum(1, keepdim=True).roll(1, -1) + torch.linspace(-2, 2, 16)[:, None, None]
    return {"coarse": coarse, "fine": fine}


def loss(model, batch):
    return F.mse_loss(model(batch["coarse"]), batch["fine"])


class TwoLevel:
    """Within the node over shared memory, between the leaders over the wire."""

    def __init__(self, rank):
        self.inside = [dist.new_group(list(members)) for members in NODES][rank.node]
        self.members = NODES[rank.node]
        self.leader = self.members[0]
        self.between = dist.new_group([members[0] for members in NODES])
        self.rank = int(rank)

    def reduce_(self, tensor):
        dist.reduce(tensor, self.leader, group=self.inside)
        if self.rank == self.leader:
            tensor /= len(self.members)
            dist.all_reduce(tensor, group=self.between)
            tensor /= len(NODES)
        dist.broadcast(tensor, self.leader, group=self.inside)


def step(model, shard, rank):
    two_level = TwoLevel(rank)
    loss(model, shard).backward()
    for parameter in model.parameters():
        two_level.reduce_(parameter.grad)


case = Case(model=build, batch=fields, loss=loss, layout="1+3")
