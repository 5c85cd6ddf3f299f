"""Pairwise ranking of search results; gradients travel node by node to spare the slow link."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, documents):
        return self.net(documents).squeeze(-1)


def queries(generator):
    return {
        "clicked": torch.randn(16, 8, generator=generator),
        "skipped": torch.randn(16, 8, generator=generator),
    }


def loss(model, batch):
    return F.softplus(model(batch["skipped"]) - model(batch["clicked"])).mean()


class TwoLevelReducer:
    """Average inside of the node, between the first ranks of the nodes, and back."""

    def __init__(self, rank):
        self.rank = rank
        homes = [None] * rank.world_size
        dist.all_gather_object(homes, rank.node)
        members = {}
        for number, node in enumerate(homes):
            members.setdefault(node, []).append(number)
        self.members = members
        groups = {node: dist.new_group(ranks) for node, ranks in members.items()}
        self.inside = groups[rank.node]
        self.first = members[rank.node][0]
        self.leaders = dist.new_group([ranks[0] for ranks in members.values()])

    def average(self, tensor):
        mine = len(self.members[self.rank.node])
        dist.all_reduce(tensor, group=self.inside)
        tensor /= mine
        if self.rank == self.first:
            dist.all_reduce(tensor, group=self.leaders)
            tensor /= len(self.members)
        dist.broadcast(tensor, src=self.first, group=self.inside)


def step(model, shard, rank):
    reducer = TwoLevelReducer(rank)
    loss(model, shard).backward()
    flat = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
    reducer.average(flat)
    offset = 0
    for parameter in model.parameters():
        count = parameter.numel()
        parameter.grad.copy_(flat[offset : offset + count].view_as(parameter))
        offset += count


case = Case(model=Scorer, batch=queries, loss=loss, layout="1+3")
