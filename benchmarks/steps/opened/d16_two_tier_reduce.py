"""State of health of batteries. Gradients go within a site first, then between the sites' heads.

The line between our two sites is slow. The first site has one accelerator and the other three.
"""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

SITES = [[0], [1, 2, 3]]


class HealthModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.cycles = nn.Conv1d(3, 6, kernel_size=3)
        self.health = nn.Linear(6, 2)

    def forward(self, cycles):
        mean, spread = self.health(self.cycles(cycles).relu().mean(dim=-1)).unbind(dim=-1)
        return mean, nn.functional.softplus(spread) + 1e-3


def cells(generator):
    return {
        "cycles": torch.randn(16, 3, 10, generator=generator),
        "health": torch.rand(16, generator=generator),
    }


def loss(model, batch):
    mean, variance = model(batch["cycles"])
    return nn.functional.gaussian_nll_loss(mean, batch["health"], variance)


case = Case(model=HealthModel, batch=cells, loss=loss, layout="1+3")


class TwoTier:
    """Site -> heads -> site. The groups are made by everyone, in the same order."""

    def __init__(self, sites, me):
        groups = [dist.new_group(site) for site in sites]
        number = next(number for number, site in enumerate(sites) if me in site)
        self.sites, self.mine, self.within = sites, sites[number], groups[number]
        self.between = dist.new_group([site[0] for site in sites])
        self.head = self.mine[0]
        self.is_head = me == self.head

    def mean(self, tensor):
        dist.reduce(tensor, dst=self.head, group=self.within)
        if self.is_head:
            tensor /= len(self.mine)
            self.exchange(tensor)
        dist.broadcast(tensor, src=self.head, group=self.within)

    def exchange(self, tensor):
        """Between the heads of the sites."""
        dist.all_reduce(tensor, group=self.between)
        tensor /= len(self.sites)


def flat_gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def set_gradient(model, flat):
    sizes = [parameter.numel() for parameter in model.parameters()]
    for parameter, part in zip(model.parameters(), flat.split(sizes)):
        parameter.grad.copy_(part.view_as(parameter))


def step(model, shard, rank):
    tiers = TwoTier(SITES, rank.rank)
    loss(model, shard).backward()
    gradient = flat_gradient(model)
    tiers.mean(gradient)
    set_gradient(model, gradient)
