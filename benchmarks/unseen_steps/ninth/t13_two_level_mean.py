"""A neural force field whose gradients are averaged in two levels: in the node, then between nodes."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

FRAMES, ATOMS = 16, 4


class ForceField(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, positions):
        between = positions[:, :, None] - positions[:, None, :]
        upper = torch.triu_indices(ATOMS, ATOMS, 1)
        distance = between[:, upper[0], upper[1]].norm(dim=-1, keepdim=True)
        return self.pair(distance).sum((1, 2))


def trajectory(generator):
    return {
        "positions": torch.randn(FRAMES, ATOMS, 3, generator=generator),
        "forces": torch.randn(FRAMES, ATOMS, 3, generator=generator),
        "energy": torch.randn(FRAMES, generator=generator),
    }


def loss(model, batch):
    positions = batch["positions"].detach().requires_grad_()
    energy = model(positions)
    (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    off = (energy - batch["energy"]).square().mean()
    return 0.1 * off + (slope + batch["forces"]).square().mean()


class TwoLevels:
    """One slow message per node: members -> leader -> other leaders -> members."""

    def __init__(self, rank):
        nodes = [None] * rank.world_size
        dist.all_gather_object(nodes, rank.node)
        members = {}
        for number, node in enumerate(nodes):
            members.setdefault(node, []).append(number)
        self.members = members[rank.node]
        self.leader = self.members[0]
        self.leads = rank.rank == self.leader
        # every rank has to make every group
        groups = {node: dist.new_group(ranks) for node, ranks in members.items()}
        self.inside = groups[rank.node]
        self.leaders = [ranks[0] for ranks in members.values()]
        self.between = dist.new_group(self.leaders)

    def mean_(self, tensor):
        dist.reduce(tensor, dst=self.leader, group=self.inside)
        if self.leads:
            tensor.div_(len(self.members))
            dist.all_reduce(tensor, group=self.between)
            tensor.div_(len(self.leaders))
        dist.broadcast(tensor, src=self.leader, group=self.inside)


class Step:
    def __init__(self, model, rank):
        self.model = model
        self.levels = TwoLevels(rank)

    def __call__(self, shard):
        loss(self.model, shard).backward()
        for p in self.model.parameters():
            if p.grad is not None:
                self.levels.mean_(p.grad)


step = Step
case = Case(model=ForceField, batch=trajectory, loss=loss, layout="1+3")
