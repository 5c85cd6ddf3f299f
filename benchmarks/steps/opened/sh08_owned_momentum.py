"""Helmholtz PINN trained with a momentum optimizer whose state is divided among the ranks: all weights lie in one
flat vector and each rank keeps the velocity of, and updates, one stretch of it."""
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


class Field(nn.Module):
    def __init__(self, width=9, wavenumber=3.0):
        super().__init__()
        torch.manual_seed(44)
        self.k = wavenumber
        self.inp = nn.Linear(2, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, xy):
        return self.out(torch.sin(self.mid(torch.sin(self.inp(xy))))).squeeze(-1)


def residual(model, xy, source):
    xy = xy.detach().requires_grad_(True)
    u = model(xy)
    first, = torch.autograd.grad(u.sum(), xy, create_graph=True)
    second = sum(torch.autograd.grad(first[..., d].sum(), xy, create_graph=True)[0][..., d] for d in range(2))
    return second + model.k ** 2 * u - source


def loss(model, batch):
    interior = residual(model, batch["inside"], batch["source"]).square().mean()
    edge = model(batch["edge"]).square().mean()
    return interior + 10.0 * edge


class OwnedMomentum:
    """SGD with momentum, one stretch of the flat parameter vector per rank."""

    def __init__(self, params, lr, momentum=0.9):
        self.params = list(params)
        self.lr, self.momentum = lr, momentum
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.total = sum(p.numel() for p in self.params)
        self.stretch = self.total // self.world
        self.velocity = self.params[0].new_zeros(self.stretch)

    def bounds(self, owner):
        start = owner * self.stretch
        return start, min(start + self.stretch, self.total)

    @torch.no_grad()
    def step(self):
        weights = torch.cat([p.flatten() for p in self.params])
        grads = torch.cat([p.grad.flatten() for p in self.params])
        for owner in range(self.world):
            lo, hi = self.bounds(owner)
            dist.reduce(grads[lo:hi], dst=owner)
        lo, hi = self.bounds(self.rank)
        velocity = self.velocity[:hi - lo]
        velocity.mul_(self.momentum).add_(grads[lo:hi], alpha=1.0 / self.world)
        weights[lo:hi].sub_(velocity, alpha=self.lr)
        for owner in range(self.world):
            lo, hi = self.bounds(owner)
            dist.broadcast(weights[lo:hi], src=owner)
        start = 0
        for p in self.params:
            p.copy_(weights[start:start + p.numel()].view_as(p))
            start += p.numel()


def step(model, shard, rank):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = OwnedMomentum(model.parameters(), lr=1.0)
    loss(model, shard).backward()
    optimizer.step()
    return {name: (before[name] - p.detach()) / optimizer.lr for name, p in model.named_parameters()}


def collocation(g):
    inside = torch.rand(16, 4, 2, generator=g)
    edge = torch.rand(16, 2, 2, generator=g)
    edge[..., 0] = edge[..., 0].round()
    return {"inside": inside, "edge": edge, "source": torch.sin(3 * inside[..., 0]) * inside[..., 1]}


case = Case(model=Field, batch=collocation, loss=loss, layout="1x4")
