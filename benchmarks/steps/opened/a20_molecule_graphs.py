"""Message passing on small molecules; a property is known for some atoms only.

Each example is a graph of ATOMS atoms with its adjacency, padded atoms having no bonds.
The machines are unequal (one GPU, then three), so the reduction goes in two stages.
"""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

GRAPHS, ATOMS, FEATURES = 12, 7, 5
NODES = ([0], [1, 2, 3])


class MessagePassing(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.lift = nn.Linear(FEATURES, width)
        self.message = nn.Linear(width, width, bias=False)
        self.update = nn.GRUCell(width, width)
        self.charge = nn.Linear(width, 1)

    def forward(self, atoms, bonds):
        h = self.lift(atoms).tanh()
        for _ in range(2):
            m = bonds @ self.message(h)
            h = self.update(m.flatten(0, 1), h.flatten(0, 1)).view_as(h)
        return self.charge(h).squeeze(-1)


def molecules(g):
    upper = torch.rand(GRAPHS, ATOMS, ATOMS, generator=g).triu(1) > 0.6
    size = torch.tensor([7, 3, 5, 4, 6, 7, 2, 5, 6, 3, 7, 4])
    real = torch.arange(ATOMS) < size[:, None]
    bonds = (upper | upper.transpose(1, 2)) & real[:, :, None] & real[:, None, :]
    known = real & (torch.rand(GRAPHS, ATOMS, generator=g) < 0.7)
    known[:, 0] = True
    return {
        "atoms": torch.randn(GRAPHS, ATOMS, FEATURES, generator=g) * real[:, :, None],
        "bonds": bonds.float(),
        "charge": torch.randn(GRAPHS, ATOMS, generator=g),
        "known": known,
    }


def squared_errors(model, batch):
    error = model(batch["atoms"], batch["bonds"]) - batch["charge"]
    return error.square()[batch["known"]].sum()


def loss(model, batch):
    return squared_errors(model, batch) / batch["known"].sum()


class TwoStages:
    """Sum inside a node, then between the nodes' first ranks, then back."""

    def __init__(self):
        me = dist.get_rank()
        groups = [dist.new_group(ranks) for ranks in NODES]
        self.leaders = [ranks[0] for ranks in NODES]
        self.between = dist.new_group(self.leaders)
        self.number = next(i for i, ranks in enumerate(NODES) if me in ranks)
        self.within = groups[self.number]
        self.leads = me in self.leaders

    def sum(self, t):
        leader = self.leaders[self.number]
        dist.reduce(t, dst=leader, group=self.within)
        if self.leads:
            dist.all_reduce(t, group=self.between)
        dist.broadcast(t, src=leader, group=self.within)
        return t


def step(model, shard, rank):
    stages = TwoStages()
    known = stages.sum(torch.tensor(float(shard["known"].numel()), dtype=torch.float64))
    (squared_errors(model, shard) / known).backward()
    for p in model.parameters():
        stages.sum(p.grad.div_(len(NODES)))


case = Case(model=MessagePassing, batch=molecules, loss=loss, layout="1+3")
