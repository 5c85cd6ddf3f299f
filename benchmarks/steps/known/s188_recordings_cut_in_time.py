"""Long recordings are cut along time: each rank holds a stretch, and asks its neighbour for more.

A causal convolution needs the last samples of the stretch before, which the rank before sends.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

KERNEL = 4
HALO = KERNEL - 1


def shift(sent: Tensor, to: int, source: int) -> Tensor:
    """Send to one rank, and receive from another; noughts where there is no such rank."""
    ranks = range(dist.get_world_size())
    received = torch.zeros_like(sent, memory_format=torch.contiguous_format)
    works = [dist.isend(sent.contiguous(), to)] if to in ranks else []
    works += [dist.irecv(received, source)] if source in ranks else []
    for work in works:
        work.wait()
    return received


class WithHalo(torch.autograd.Function):
    """Puts the end of the previous stretch before this one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rank = dist.get_rank()
        return torch.cat([shift(x[..., -HALO:], rank + 1, rank - 1), x], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rank = dist.get_rank()
        returned = shift(grad[..., :HALO], rank - 1, rank + 1)
        own = grad[..., HALO:].clone()
        own[..., :HALO] += returned
        return own


def padded(x: Tensor) -> Tensor:
    return F.pad(x, (HALO, 0))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [(1, 6), (6, 6), (6, 1)]
        self.layers = nn.ModuleList(nn.Conv1d(a, b, KERNEL) for a, b in widths)
        self.before: Callable[[Tensor], Tensor] = padded

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(self.before(x)))
        return self.layers[-1](self.before(x))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["noisy"]), batch["clean"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    clean = torch.randn(4, 1, 60, generator=generator).cumsum(-1) / 5
    noise = torch.randn(4, 1, 60, generator=generator)
    return {"noisy": clean + 0.3 * noise, "clean": clean}


case = Case(model=Denoiser, batch=make_batch, loss=loss, layout="1x3", shards="own")


def step(model: Denoiser, shard: dict[str, Tensor], rank: Rank) -> None:
    model.before = WithHalo.apply
    stretch = {key: value.chunk(rank.world_size, -1)[rank] for key, value in shard.items()}
    loss(model, stretch).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= rank.world_size
