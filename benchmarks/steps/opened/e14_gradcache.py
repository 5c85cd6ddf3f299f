"""Large-batch contrastive training in chunks (GradCache): embed, cache gradients, embed again."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

FEATURES, WIDTH, PAIRS = 7, 6, 20

Batch = dict[str, Tensor]


@dataclass
class GradCacheConfig:
    chunk_size: int = 4
    temperature: float = 0.3


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.document = nn.Linear(FEATURES, WIDTH)

    def forward(self, queries: Tensor, documents: Tensor) -> Tensor:
        pair = torch.stack([self.query(queries), self.document(documents)], dim=1)
        return F.normalize(pair, dim=-1)


def make_batch(generator: torch.Generator) -> Batch:
    queries = torch.randn(PAIRS, FEATURES, generator=generator)
    noise = torch.randn(PAIRS, FEATURES, generator=generator)
    return {"queries": queries, "documents": queries.flip(1) + 0.5 * noise}


def contrastive(pairs: Tensor, temperature: float) -> Tensor:
    """Symmetric InfoNCE over (pairs, 2, width)."""
    scores = pairs[:, 0] @ pairs[:, 1].T / temperature
    labels = torch.arange(len(pairs))
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


def loss(model: nn.Module, batch: Batch) -> Tensor:
    config = GradCacheConfig()
    return contrastive(model(batch["queries"], batch["documents"]), config.temperature)


class GradCache:
    def __init__(self, model: nn.Module, config: GradCacheConfig) -> None:
        self.model = DistributedDataParallel(model)
        self.config = config

    def chunks(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        size = self.config.chunk_size
        return list(zip(batch["queries"].split(size), batch["documents"].split(size), strict=True))

    @torch.no_grad()
    def embed(self, batch: Batch) -> Tensor:
        return torch.cat([self.model.module(*chunk) for chunk in self.chunks(batch)])

    def cached_gradients(self, local: Tensor) -> Tensor:
        """Gradient of the loss over all pairs by the embeddings of this rank."""
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, local)
        gathered[dist.get_rank()] = local.requires_grad_()
        value = contrastive(torch.cat(gathered), self.config.temperature)
        (gradient,) = torch.autograd.grad(value, local)
        return gradient * dist.get_world_size()  # DDP averages

    def second_pass(self, batch: Batch, gradients: Tensor) -> None:
        """Communicates once, in the backward of the last chunk."""
        last = len(batch["queries"]) // self.config.chunk_size - 1
        parts = gradients.split(self.config.chunk_size)
        for number, (chunk, part) in enumerate(zip(self.chunks(batch), parts, strict=True)):
            with nullcontext() if number == last else self.model.no_sync():
                self.model(*chunk).backward(part)

    def __call__(self, batch: Batch) -> None:
        gradients = self.cached_gradients(self.embed(batch))
        self.second_pass(batch, gradients)


case = Case(model=Embedder, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank) -> None:
    GradCache(model, GradCacheConfig())(shard)
