"""Megatron-like MLP by hand: nodes are tensor-parallel groups, data parallel runs between nodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

WIDTH, HIDDEN, CLASSES = 6, 8, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        return self.head(h + self.down(F.gelu(self.up(h))))


class Mesh(NamedTuple):
    tp: dist.ProcessGroup
    dp: dist.ProcessGroup
    tp_rank: int


def make_mesh(tp_size: int = 2) -> Mesh:
    world, me = dist.get_world_size(), dist.get_rank()
    tps = [dist.new_group(list(range(i, i + tp_size))) for i in range(0, world, tp_size)]
    dps = [dist.new_group(list(range(i, world, tp_size))) for i in range(tp_size)]
    return Mesh(tps[me // tp_size], dps[me % tp_size], me % tp_size)


def to_model_parallel(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Identity; every tensor-parallel rank reads the same activations."""
    return _Copy.apply(x, group)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_h):
        return grad_h, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def tp_forward(model: Net, x: Tensor, mesh: Mesh) -> Tensor:
    size = HIDDEN // dist.get_world_size(mesh.tp)
    cut = slice(mesh.tp_rank * size, (mesh.tp_rank + 1) * size)
    h = model.inp(x)
    z = F.gelu(F.linear(to_model_parallel(h, mesh.tp), model.up.weight[cut], model.up.bias[cut]))
    z = _Reduce.apply(F.linear(z, model.down.weight[:, cut]), mesh.tp)
    return model.head(h + z)


def gather_rows(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, t.contiguous(), group=group)
    return torch.cat(parts)


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": torch.randn(16, 7, generator=generator), "y": torch.randint(0, CLASSES, (16,), generator=generator)}


case = Case(model=Net, batch=batch, loss=lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), layout="2x2")


def step(model: Net, shard: dict[str, Tensor], rank: Rank) -> None:
    mesh = make_mesh()
    x, y = (gather_rows(shard[k], mesh.tp) for k in ("x", "y"))  # one replica, one set of rows
    F.cross_entropy(tp_forward(model, x, mesh), y).backward()
    for name, p in model.named_parameters():
        if name.startswith(("up", "down")):
            dist.all_reduce(p.grad, group=mesh.tp)  # zero outside of the slice
        dist.all_reduce(p.grad, group=mesh.dp)
        p.grad /= dist.get_world_size(mesh.dp)
