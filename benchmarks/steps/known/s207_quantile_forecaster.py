"""Quantile forecasts of sales. Shops are unevenly spread over the ranks, and trained on in pairs.

Gradients are summed over pairs and ranks, and every shop counts the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

QUANTILES = (0.1, 0.5, 0.9)
HORIZON = 3


@dataclass
class Sales:
    """``past`` and ``future`` (shops, days). Days on which a shop was shut are not ``open``."""

    past: Tensor
    future: Tensor
    open: Tensor

    def __len__(self) -> int:
        return len(self.past)

    def shops(self, chosen: slice) -> "Sales":
        return Sales(self.past[chosen], self.future[chosen], self.open[chosen])


class Forecaster(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.rnn = nn.GRU(1, width, batch_first=True)
        self.quantiles = nn.Linear(width, HORIZON * len(QUANTILES))

    def forward(self, past: Tensor) -> Tensor:
        level = past.mean(1, keepdim=True)
        _, state = self.rnn((past / level - 1)[..., None])
        growth = self.quantiles(state[0]).unflatten(-1, (HORIZON, len(QUANTILES)))
        return level[..., None] * (1 + growth)


def shop_losses(model: nn.Module, sales: Sales) -> Tensor:
    """The pinball loss of every shop: a mean over the days on which it was open."""
    error = sales.future[..., None] - model(sales.past)
    quantiles = error.new_tensor(QUANTILES)
    pinball = torch.maximum(quantiles * error, (quantiles - 1) * error).mean(-1)
    return (pinball * sales.open).sum(1) / sales.open.sum(1).clamp(min=1)


def loss(model: nn.Module, sales: Sales) -> Tensor:
    return shop_losses(model, sales).mean()


def make_batch(generator: torch.Generator) -> Sales:
    return Sales(
        past=1 + torch.rand(12, 7, generator=generator),
        future=1 + torch.rand(12, HORIZON, generator=generator),
        open=torch.rand(12, HORIZON, generator=generator) < 0.8,
    )


case = Case(model=Forecaster, batch=make_batch, loss=loss, layout="1x2", shards="7+5")


def pieces(sales: Sales, size: int) -> Iterator[Sales]:
    for index in range(len(sales) // size):
        yield sales.shops(slice(index * size, (index + 1) * size))


def step(model: nn.Module, shard: Sales, rank: Rank) -> None:
    shops = torch.tensor(len(shard), device=rank.device)
    dist.all_reduce(shops)
    for piece in pieces(shard, size=2):
        (shop_losses(model, piece).sum() / shops).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
