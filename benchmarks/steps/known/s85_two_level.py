"""Two-level averaging: first inside a node, then between nodes, then back into the node."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_batch(generator):
    return {
        "x": torch.randn(12, 5, generator=generator),
        "y": torch.randn(12, 3, generator=generator),
    }


case = Case(model=Mlp, batch=make_batch, loss=loss, layout="1+2")


class TwoLevelReducer:
    def __init__(self, rank):
        places = [None] * rank.world_size
        dist.all_gather_object(places, rank.node)
        self.members = {}
        for member, node in enumerate(places):
            self.members.setdefault(node, []).append(member)
        # every rank has to take part in making every group
        groups = {node: dist.new_group(ranks) for node, ranks in self.members.items()}
        self.leaders = [ranks[0] for ranks in self.members.values()]
        self.leader_group = dist.new_group(self.leaders)
        self.node_group = groups[rank.node]
        self.rank = rank

    @property
    def leader(self):
        return self.members[self.rank.node][0]

    def reduce(self, flat):
        # fast links
        dist.reduce(flat, dst=self.leader, group=self.node_group)
        if self.rank.rank == self.leader:
            flat.div_(self.rank.local_world_size)
            # slow links
            dist.all_reduce(flat, group=self.leader_group)
            flat.div_(len(self.leaders))
        dist.broadcast(flat, src=self.leader, group=self.node_group)


def step(model, shard, rank):
    model.zero_grad()
    reducer = TwoLevelReducer(rank)
    loss(model, shard).backward()
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    reducer.reduce(flat)
    for g, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(piece.view_as(g))
