"""Dense retrieval with in-batch and hard negatives, shared across ranks (DPR / GTE style)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCAB, LENGTH, PAIRS = 40, 6, 12

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class RetrievalConfig:
    hidden: int = 10
    embedding: int = 8
    temperature: float = 0.2


CONFIG = RetrievalConfig()


class Encoder(nn.Module):
    """One tower for queries and passages: mean pooling over the tokens that are not padding."""

    def __init__(self, config: RetrievalConfig = CONFIG) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, config.hidden)
        self.body = nn.Sequential(nn.Linear(config.hidden, config.hidden), nn.Tanh())
        self.project = nn.Linear(config.hidden, config.embedding)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 0).unsqueeze(-1)
        states = self.body(self.tokens(ids)) * mask
        pooled = states.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return F.normalize(self.project(pooled), dim=-1)


def make_batch(generator: torch.Generator) -> Batch:
    def texts() -> Tensor:
        ids = torch.randint(1, VOCAB, (PAIRS, LENGTH), generator=generator)
        lengths = torch.randint(2, LENGTH + 1, (PAIRS, 1), generator=generator)
        return ids.masked_fill(torch.arange(LENGTH) >= lengths, 0)

    return {"query": texts(), "positive": texts(), "negative": texts()}


def encode(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Queries, and the passages: all positives first, then all mined negatives."""
    count = len(batch["query"])
    vectors = model(torch.cat([batch["query"], batch["positive"], batch["negative"]]))
    return vectors[:count], vectors[count:]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    queries, passages = encode(model, batch)
    scores = queries @ passages.T / CONFIG.temperature
    return F.cross_entropy(scores, torch.arange(len(queries)))


class CrossDeviceContrastive:
    """Scores the queries of this rank against the passages of all ranks."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.rank = dist.get_rank()

    def targets(self, queries: Tensor, passages: Tensor) -> Tensor:
        """Column of the positive of each query among the gathered passages."""
        first = self.rank * len(queries)
        return torch.arange(first, first + len(queries))

    def __call__(self, queries: Tensor, passages: Tensor) -> Tensor:
        targets = self.targets(queries, passages)
        everywhere = torch.cat(all_gather(passages.contiguous()))
        scores = queries @ everywhere.T / self.temperature
        return F.cross_entropy(scores, targets)


class RetrievalTrainer:
    def __init__(self, model: nn.Module, config: RetrievalConfig = CONFIG) -> None:
        self.model = DistributedDataParallel(model)
        self.criterion = CrossDeviceContrastive(config.temperature)

    def training_step(self, batch: Batch) -> Tensor:
        queries, passages = encode(self.model, batch)
        value = self.criterion(queries, passages)
        value.backward()
        return value.detach()


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="1x3")


def step(model: nn.Module, shard: Batch, rank) -> None:
    RetrievalTrainer(model).training_step(shard)
