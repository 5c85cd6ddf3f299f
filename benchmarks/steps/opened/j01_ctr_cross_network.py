"""Click-through rate on tabular impressions: a deep and cross network with balanced classes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

FIELDS, DENSE, VOCABULARY = 4, 6, 12


@dataclass
class Settings:
    embedding: int = 3
    cross_layers: int = 2
    hidden: tuple[int, ...] = (16, 8)
    bucket_mb: float = 0.01
    l2: float = 1e-3
    regularised: tuple[str, ...] = field(default=("cross",))


class Cross(nn.Module):
    """x0 * (w x + b) + x"""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return first * self.linear(x) + x


class DeepCross(nn.Module):
    def __init__(self, settings: Settings):
        super().__init__()
        width = FIELDS * settings.embedding + DENSE
        self.tables = nn.ModuleList(
            nn.Embedding(VOCABULARY, settings.embedding) for _ in range(FIELDS)
        )
        self.cross = nn.ModuleList(Cross(width) for _ in range(settings.cross_layers))
        sizes = (width, *settings.hidden)
        self.deep = nn.Sequential()
        for number, (inside, outside) in enumerate(zip(sizes, sizes[1:])):
            self.deep.add_module(f"linear{number}", nn.Linear(inside, outside))
            self.deep.add_module(f"act{number}", nn.SiLU())
        self.top = nn.Linear(width + sizes[-1], 1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        looked_up = [table(ids[:, place]) for place, table in enumerate(self.tables)]
        first = torch.cat([*looked_up, dense], dim=1)
        x = first
        for layer in self.cross:
            x = layer(first, x)
        return self.top(torch.cat([x, self.deep(first)], dim=1)).squeeze(1)


SETTINGS = Settings()


def balance(clicked: Tensor) -> Tensor:
    """Weight of a click, such that clicks and non-clicks contribute alike."""
    clicks = clicked.sum()
    return (clicked.numel() - clicks) / clicks.clamp(min=1)


def penalty(model: nn.Module, settings: Settings) -> Tensor:
    squares = [
        weight.square().sum()
        for name, weight in model.named_parameters()
        if any(part in name for part in settings.regularised)
    ]
    return settings.l2 * torch.stack(squares).sum()


def objective(model: nn.Module, batch: dict, click_weight: Tensor) -> Tensor:
    logits = model(batch["ids"], batch["dense"])
    fit = F.binary_cross_entropy_with_logits(logits, batch["clicked"], pos_weight=click_weight)
    return fit + penalty(model, SETTINGS)


def loss(model: nn.Module, batch: dict) -> Tensor:
    return objective(model, batch, balance(batch["clicked"]))


def impressions(generator: torch.Generator) -> dict:
    count = 24
    dense = torch.randn(count, DENSE, generator=generator)
    # The log is ordered by campaign, and early campaigns were clicked more.
    rate = torch.linspace(0.8, 0.2, count)
    clicked = (torch.rand(count, generator=generator) < rate).float()
    clicked[0], clicked[-1], clicked[-2] = 1.0, 0.0, 1.0
    ids = torch.randint(0, VOCABULARY, (count, FIELDS), generator=generator)
    return {"ids": ids, "dense": dense, "clicked": clicked}


case = Case(model=lambda: DeepCross(SETTINGS), batch=impressions, loss=loss, layout="1x2")


def step(model: nn.Module, shard: dict, rank) -> None:
    ddp = DDP(model, bucket_cap_mb=SETTINGS.bucket_mb, gradient_as_bucket_view=True)
    click_weight = balance(shard["clicked"])
    objective(ddp, shard, click_weight).backward()
