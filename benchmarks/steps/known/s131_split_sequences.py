"""Attention over sequences that are split over the ranks of a node; nodes hold other sequences.

Queries stay where they are. Keys and values are gathered from the node before the attention.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


class Attention(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, gather: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        if gather is not None:
            key, value = gather(key), gather(value)
        return x + self.out(F.scaled_dot_product_attention(query, key, value))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "x": torch.randn(6, 8, 6, generator=generator),
        "y": torch.randn(6, 8, 6, generator=generator),
    }


case = Case(model=Attention, batch=make_batch, loss=loss, layout="2x2", shards="own")


class GatherSequence(torch.autograd.Function):
    """Joins the parts of a sequence; in the backward pass every rank gets its part back."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        return grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()], None


def own_part(batch: Batch, rank: Rank) -> Batch:
    """The sequences of this node, and of these the positions of this rank."""
    own = {name: leaf.chunk(rank.nodes)[rank.node] for name, leaf in batch.items()}
    return {
        name: leaf.chunk(rank.local_world_size, dim=1)[rank.local_rank]
        for name, leaf in own.items()
    }


def step(model: nn.Module, batch: Batch, rank: Rank) -> None:
    shape = (rank.nodes, rank.local_world_size)
    mesh = init_device_mesh(rank.device.type, shape, mesh_dim_names=("data", "sequence"))
    group = mesh.get_group("sequence")
    part = own_part(batch, rank)
    output = model(part["x"], lambda tensor: GatherSequence.apply(tensor, group))
    F.mse_loss(output, part["y"]).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size
