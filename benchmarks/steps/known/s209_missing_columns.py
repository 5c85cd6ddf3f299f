"""A net for tables with gaps. Gaps are filled with learned values, and go through a branch.

The branch does not run for complete rows. So ranks may have no gradients for some parameters.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]
COLUMNS = 6


class GapBranch(nn.Module):
    """What a row's gaps tell about it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fill = nn.Parameter(torch.randn(COLUMNS) / 4)
        self.pattern = nn.Linear(COLUMNS, width)

    def forward(self, columns: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(gap, self.fill, columns), self.pattern(gap.to(columns.dtype))


class TableNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.gaps = GapBranch(width)
        self.enter = nn.Linear(COLUMNS, width)
        self.block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SELU())
        self.price = nn.Linear(width, 1)

    def forward(self, columns: Tensor, gap: Tensor) -> Tensor:
        incomplete = gap.any(1, keepdim=True)
        if incomplete.any():
            columns, pattern = self.gaps(columns, gap)
            hidden = self.enter(columns) + incomplete * pattern
        else:
            hidden = self.enter(columns)
        return self.price(hidden + self.block(hidden))[:, 0]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.huber_loss(model(batch["columns"], batch["gap"]), batch["price"])


def make_batch(generator: torch.Generator) -> Batch:
    gap = torch.zeros(12, COLUMNS, dtype=torch.bool)
    gap[[0, 2, 2, 4, 5], [1, 3, 5, 0, 4]] = True
    columns = torch.randn(12, COLUMNS, generator=generator)
    return {
        "columns": columns.masked_fill(gap, 0.0),
        "gap": gap,
        "price": torch.randn(12, generator=generator),
    }


case = Case(model=TableNet, batch=make_batch, loss=loss, layout="1x4")


class GradientExchange:
    """Averages gradients. A rank without a gradient for a parameter takes part with zeros."""

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.parameters = list(model.parameters())
        self.world_size = world_size

    @torch.no_grad()
    def average(self, device: torch.device) -> None:
        present = torch.tensor([float(p.grad is not None) for p in self.parameters], device=device)
        dist.all_reduce(present)
        for p, holders in zip(self.parameters, present.tolist(), strict=True):
            if holders == 0:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= holders


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    loss(model, shard).backward()
    GradientExchange(model, rank.world_size).average(rank.device)
