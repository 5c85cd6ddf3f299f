"""Heads of an attention layer are split over pairs of ranks, examples over the two pairs."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

WIDTH, HEADS, SPLIT = 8, 4, 2


def attend(x: Tensor, inner: Tensor, outer: Tensor, heads: int) -> Tensor:
    queries, keys, values = (
        part.unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in F.linear(x, inner).chunk(3, dim=-1)
    )
    mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    return F.linear(mixed.transpose(1, 2).flatten(2), outer)


class Classifier(nn.Module):
    """One layer of attention, then the mean over the places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 3)
        self.outer = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.classes = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + attend(self.norm(x), self.inner, self.outer, HEADS)
        return self.classes(x.mean(1))


case = Case(
    model=Classifier,
    batch=lambda g: (torch.randn(8, 5, WIDTH, generator=g), torch.arange(8) % 3),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    layout="2x2",
    shards="own",
)


class Enter(torch.autograd.Function):  # the same inputs on every rank of the group
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Leave(torch.autograd.Function):  # the sum of what the ranks of the group have
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def step(model: Classifier, batch: tuple[Tensor, Tensor], rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (rank.world_size // SPLIT, SPLIT), mesh_dim_names=("d", "t"))
    group, part = mesh.get_group("t"), mesh.get_local_rank("t")
    x, labels = (t.chunk(mesh.size(0))[mesh.get_local_rank("d")] for t in batch)
    inner = model.inner.chunk(SPLIT)[part]
    outer = model.outer.chunk(SPLIT, dim=1)[part]
    partial = attend(Enter.apply(model.norm(x), group), inner, outer, HEADS // SPLIT)
    x = x + Leave.apply(partial, group)
    F.cross_entropy(model.classes(x.mean(1)), labels).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= mesh.size(0) if p is model.inner or p is model.outer else rank.world_size
