"""Margin ranking with one encoder for both texts, replicated with the composable API."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

WORDS, WIDTH, OUT = 31, 12, 8


class Encoder(nn.Module):
    """Embeds texts. ``forward`` also normalises, which retrieval needs."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")
        self.hidden = nn.Linear(WIDTH, 2 * WIDTH)
        self.project = nn.Linear(2 * WIDTH, OUT)

    def embed(self, texts: Tensor) -> Tensor:
        return self.project(F.mish(self.hidden(self.words(texts))))

    def forward(self, texts: Tensor) -> Tensor:
        return F.normalize(self.embed(texts), dim=-1)


class RankingObjective:
    def __init__(self, margin: float = 0.4) -> None:
        self.margin = margin

    def __call__(self, encoder: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        # One pass for queries, documents that fit, and documents that do not.
        texts = torch.cat([batch["query"], batch["good"], batch["bad"]])
        embedded = F.normalize(encoder.embed(texts), dim=-1)
        query, good, bad = embedded.chunk(3)
        difference = (query * good).sum(-1) - (query * bad).sum(-1)
        return F.softplus(self.margin - difference).mean()


class ReplicatedTraining:
    def __init__(self, encoder: nn.Module, objective: RankingObjective, rank: Rank) -> None:
        self.encoder = replicate(encoder, bucket_cap_mb=1, gradient_as_bucket_view=True)
        self.objective = objective
        self.rank = rank

    def backward(self, batch: dict[str, Tensor]) -> float:
        value = self.objective(self.encoder, batch)
        value.backward()
        return value.item()


objective = RankingObjective()


def make_texts(generator: torch.Generator) -> dict[str, Tensor]:
    def texts() -> Tensor:
        return torch.randint(WORDS, (16, 5), generator=generator)

    query = texts()
    return {"query": query, "good": query.roll(1, dims=1) // 2, "bad": texts()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return objective(model, batch)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ReplicatedTraining(model, objective, rank).backward(shard)


case = Case(model=Encoder, batch=make_texts, loss=loss, layout="2x2")
