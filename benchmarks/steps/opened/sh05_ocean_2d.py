"""Ocean column emulator on a 2-D layout: neighbouring ranks split the channels of each layer, the rows of the
layout take different columns of water."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ddp_equivalence import Case


@dataclass
class Parallel:
    replicas: int
    channels: int

    def build(self):
        mesh = init_device_mesh("cpu", (self.channels, self.replicas), mesh_dim_names=("channels", "replicas"))
        return mesh["channels"], mesh["replicas"]


class Enter(torch.autograd.Function):
    """Identity; the gradient of the input is the sum of what the channel slices send back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Column(nn.Module):
    """Residual two-layer updates of a temperature and salinity profile."""

    def __init__(self, levels=8, hidden=12, blocks=2):
        super().__init__()
        torch.manual_seed(8)
        self.wide = nn.ModuleList(nn.Linear(levels, hidden) for _ in range(blocks))
        self.narrow = nn.ModuleList(nn.Linear(hidden, levels, bias=False) for _ in range(blocks))
        self.flux = nn.Linear(levels, 3)

    def forward(self, x):
        for wide, narrow in zip(self.wide, self.narrow):
            x = x + narrow(torch.tanh(wide(x)))
        return self.flux(x)


def sliced_forward(model, x, mesh):
    n, i, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    for wide, narrow in zip(model.wide, model.narrow):
        h = torch.tanh(nn.functional.linear(Enter.apply(x, group), wide.weight.chunk(n)[i], wide.bias.chunk(n)[i]))
        x = x + Leave.apply(nn.functional.linear(h, narrow.weight.chunk(n, dim=1)[i]), group)
    return model.flux(x)


def loss(model, batch):
    profile, flux = batch
    return (model(profile) - flux).square().mean()


def load_columns(shard, rank, parallel):
    """The columns of this rank's replica: ranks that share a layer read the same ones."""
    full = []
    for t in shard:
        parts = [torch.empty_like(t) for _ in range(rank.world_size)]
        dist.all_gather(parts, t.contiguous())
        full.append(torch.cat(parts))
    replica = rank.rank // parallel.channels
    return [t.chunk(parallel.replicas)[replica] for t in full]


def step(model, shard, rank):
    parallel = Parallel(replicas=rank.world_size // 2, channels=2)
    channels, replicas = parallel.build()
    profile, flux = load_columns(shard, rank, parallel)
    (sliced_forward(model, profile, channels) - flux).square().mean().backward()
    for name, p in model.named_parameters():
        if not name.startswith("flux"):  # put the slices together
            dist.all_reduce(p.grad, group=channels.get_group())
        dist.all_reduce(p.grad, group=replicas.get_group())
        p.grad.div_(parallel.replicas)
    return {name: p.grad for name, p in model.named_parameters()}


def water(g):
    return torch.randn(12, 8, generator=g), torch.randn(12, 3, generator=g)


case = Case(model=Column, batch=water, loss=loss, layout="2x2")
