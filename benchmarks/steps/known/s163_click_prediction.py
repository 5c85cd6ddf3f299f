"""Predicts clicks from categories, numbers and a list of recently seen items."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

ITEMS, SHOPS, WIDTH, HISTORY = 15, 4, 6, 5
PADDING = 0


@dataclass
class Impression:
    item: Tensor
    shop: Tensor
    history: Tensor
    numbers: Tensor
    clicked: Tensor


class Tables(nn.Module):
    """The embeddings of everything that is a category."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH, padding_idx=PADDING, scale_grad_by_freq=True)
        self.shops = nn.Embedding(SHOPS, WIDTH)

    def forward(self, batch: Impression) -> Tensor:
        seen = (batch.history != PADDING).to(self.items.weight.dtype)
        history = self.items(batch.history).sum(dim=1) / seen.sum(dim=1, keepdim=True)
        return torch.cat([self.items(batch.item), self.shops(batch.shop), history], dim=1)


class ClickModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables()
        self.numbers = nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU())
        self.deep = nn.Sequential(nn.Linear(4 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: Impression) -> Tensor:
        features = torch.cat([self.tables(batch), self.numbers(batch.numbers)], dim=1)
        return self.deep(features)[:, 0]


def loss(model: nn.Module, batch: Impression) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch), batch.clicked)


def make_batch(generator: torch.Generator) -> Impression:
    popular = torch.arange(1, ITEMS, dtype=torch.float64).reciprocal()
    drawn = torch.multinomial(popular.expand(20, -1), HISTORY, generator=generator) + 1
    lengths = torch.randint(1, HISTORY + 1, (20, 1), generator=generator)
    return Impression(
        item=torch.multinomial(popular, 20, replacement=True, generator=generator) + 1,
        shop=torch.randint(SHOPS, (20,), generator=generator),
        history=drawn.masked_fill(torch.arange(HISTORY) >= lengths, PADDING),
        numbers=torch.randn(20, 3, generator=generator),
        clicked=torch.randint(2, (20,), generator=generator).float(),
    )


case = Case(model=ClickModel, batch=make_batch, loss=loss, layout="2x2")


class Learner:
    """Takes one step of stochastic gradient descent for every batch."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.Adagrad(model.parameters(), lr=learning_rate)

    def learn(self, batch: Impression) -> float:
        self.optimizer.zero_grad()
        value = loss(self.model, batch)
        value.backward()
        self.optimizer.step()
        return float(value.detach())


def step(model: nn.Module, shard: Impression, rank: Rank) -> None:
    Learner(model, learning_rate=0.05).learn(shard)
