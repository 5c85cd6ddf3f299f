"""Gradients travel in one buffer, in which every tensor begins at a multiple of eight elements."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

ALIGNMENT = 8


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(2, 6, kernel_size=3, padding=1)
        self.scale = nn.Parameter(torch.full((6, 1), 0.5))
        self.leave = nn.Conv1d(6, 2, kernel_size=3, padding=1)

    def forward(self, noisy: Tensor) -> Tensor:
        return noisy - self.leave(self.scale * F.silu(self.enter(noisy)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    clean, noise = batch
    return F.mse_loss(model(clean + noise), clean)


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    clean = torch.randn(12, 2, 10, generator=generator)
    noise = 0.3 * torch.randn(12, 2, 10, generator=generator)
    return clean, noise


case = Case(model=Denoiser, batch=make_batch, loss=loss, layout="2+1")


def aligned(elements: int) -> int:
    return (elements + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def pack(tensors: list[Tensor]) -> Tensor:
    buffer = tensors[0].new_zeros(sum(aligned(t.numel()) for t in tensors))
    offset = 0
    for t in tensors:
        buffer[offset : offset + t.numel()] = t.flatten()
        offset += aligned(t.numel())
    return buffer


def unpack(buffer: Tensor, tensors: list[Tensor]) -> None:
    offset = 0
    for t in tensors:
        stop = offset + t.numel()
        t.copy_(buffer[offset:stop].view_as(t))
        offset = stop


def exchange(tensors: list[Tensor], world_size: int) -> None:
    buffer = pack(tensors)
    dist.all_reduce(buffer)
    buffer.mul_(1 / world_size)
    unpack(buffer, tensors)


def step(model: nn.Module, shard: tuple[Tensor, Tensor], rank: Rank) -> None:
    model.zero_grad()
    loss(model, shard).backward()
    exchange([p.grad for p in model.parameters() if p.grad is not None], rank.world_size)
