"""A feed-forward block whose hidden units are split over the ranks; all ranks see all rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

WIDTH, HIDDEN, ROWS = 6, 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        stream = self.embed(rows)
        return stream + self.down(F.gelu(self.up(self.norm(stream))))


def sensor_rows(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(ROWS, 4, generator=generator),
        "targets": torch.randn(ROWS, WIDTH, generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"])


class EnterSplit(torch.autograd.Function):
    """From the replicated stream into the split region."""

    @staticmethod
    def forward(ctx, stream: Tensor) -> Tensor:
        return stream.view_as(stream)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class LeaveSplit(torch.autograd.Function):
    """From partial sums in the split region back to the replicated stream."""

    @staticmethod
    def forward(ctx, partial: Tensor) -> Tensor:
        total = partial.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class SplitBlock:
    """The block's arithmetic with the hidden units of one rank."""

    def __init__(self, block: Block, rank: int, world: int) -> None:
        self.block = block
        size = HIDDEN // world
        self.own = slice(rank * size, (rank + 1) * size)

    def __call__(self, rows: Tensor) -> Tensor:
        block, own = self.block, self.own
        stream = block.embed(rows)
        inner = EnterSplit.apply(block.norm(stream))
        hidden = F.gelu(F.linear(inner, block.up.weight[own], block.up.bias[own]))
        partial = F.linear(hidden, block.down.weight[:, own])
        return stream + LeaveSplit.apply(partial) + block.down.bias

    def join_gradients(self) -> None:
        """Every rank has the gradients of its hidden units, and zeros for the others'."""
        for parameter in (self.block.up.weight, self.block.up.bias, self.block.down.weight):
            dist.all_reduce(parameter.grad)


def step(model: Block, batch: dict[str, Tensor], rank) -> None:
    split = SplitBlock(model, rank.rank, rank.world_size)
    F.mse_loss(split(batch["rows"]), batch["targets"]).backward()
    split.join_gradients()


case = Case(model=Block, batch=sensor_rows, loss=loss, layout="1x2", shards="own")
