"""Claims of an insurance: gradients are averaged inside each node first, then between the nodes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

FIELDS = 9


class Claims(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FIELDS, 14), nn.Mish())
        self.count = nn.Linear(14, 1)

    def forward(self, fields):
        return self.count(self.trunk(fields)).squeeze(-1)


def policies(generator):
    n = 24
    fields = torch.randn(n, FIELDS, generator=generator)
    years = torch.rand(n, generator=generator) + 0.2
    claims = torch.poisson(years * fields[:, 0].exp(), generator=generator)
    return {"fields": fields, "years": years, "claims": claims}


def loss(model, batch):
    rate = model(batch["fields"]) + batch["years"].log()
    return F.poisson_nll_loss(rate, batch["claims"], log_input=True)


class Topology:
    """One group for every node, and one of the first ranks of all nodes."""

    def __init__(self, rank):
        node = torch.tensor([int(rank.node)])
        nodes = [torch.empty_like(node) for _ in range(rank.world_size)]
        dist.all_gather(nodes, node)
        self.members = {}
        for number, each in enumerate(nodes):
            self.members.setdefault(each.item(), []).append(number)
        groups = {n: dist.new_group(ranks) for n, ranks in sorted(self.members.items())}
        self.heads = sorted(ranks[0] for ranks in self.members.values())
        self.between = dist.new_group(self.heads)
        self.ranks = self.members[int(rank.node)]
        self.inside = groups[int(rank.node)]
        self.is_head = rank.rank in self.heads


class HierarchicalMean:
    def __init__(self, topology):
        self.topology = topology

    def __call__(self, tensor):
        t = self.topology
        dist.reduce(tensor, dst=t.ranks[0], group=t.inside)
        if t.is_head:
            tensor /= len(t.ranks)
            dist.all_reduce(tensor, group=t.between)
            tensor /= len(t.heads)
        dist.broadcast(tensor, src=t.ranks[0], group=t.inside)


def step(model, shard, rank):
    mean = HierarchicalMean(Topology(rank))
    loss(model, shard).backward()
    for p in model.parameters():
        mean(p.grad)


case = Case(model=Claims, batch=policies, loss=loss, layout="1+3")
