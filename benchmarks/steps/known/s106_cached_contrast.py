"""Contrastive training in little memory: embeddings first, then gradients chunk by chunk."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CHUNK = 3
TEMPERATURE = 0.3


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 5))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.net(left), dim=1), F.normalize(self.net(right), dim=1)


def contrast(left: Tensor, right: Tensor) -> Tensor:
    scores = left @ right.T / TEMPERATURE
    own = torch.arange(len(left), device=left.device)
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return contrast(*model(batch["left"], batch["right"]))


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    left = torch.randn(18, 8, generator=generator)
    return {"left": left, "right": left + 0.5 * torch.randn(18, 8, generator=generator)}


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="1x2")


class CachedTrainer:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.ddp = DistributedDataParallel(model)
        self.rank = rank

    def embed(self, chunks: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The embeddings of all chunks, as leaves that collect the gradient of the loss."""
        with torch.no_grad():
            pairs = [self.ddp.module(left, right) for left, right in chunks]
        return [torch.cat(side).requires_grad_() for side in zip(*pairs, strict=True)]

    def gather(self, mine: Tensor) -> Tensor:
        """The embeddings of all ranks; only the rank's own get a gradient here."""
        parts = [torch.empty_like(mine) for _ in range(self.rank.world_size)]
        dist.all_gather(parts, mine.detach())
        parts[self.rank.rank] = mine
        return torch.cat(parts)

    def cache(self, left: Tensor, right: Tensor) -> list[tuple[Tensor, ...]]:
        value = contrast(self.gather(left), self.gather(right))
        grads = torch.autograd.grad(value, (left, right))
        return list(zip(*(grad.split(CHUNK) for grad in grads), strict=True))

    def train(self, batch: dict[str, Tensor]) -> None:
        chunks = list(zip(batch["left"].split(CHUNK), batch["right"].split(CHUNK), strict=True))
        cached = self.cache(*self.embed(chunks))
        for index, (chunk, grads) in enumerate(zip(chunks, cached, strict=True), start=1):
            last = index == len(chunks)
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                torch.autograd.backward(self.ddp(*chunk), grads)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    CachedTrainer(model, rank).train(shard)
