"""Momentum contrast: keys are computed in shuffled order, as the reference code does."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

IMAGES, PIXELS, EMBEDDING, QUEUE, TEMPERATURE = 12, 9, 6, 10, 0.3

Batch = dict[str, Tensor]


def make_encoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(PIXELS, 12), nn.GELU(), nn.Linear(12, EMBEDDING))


class MoCo(nn.Module):
    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q = make_encoder()
        self.encoder_k = make_encoder().requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(QUEUE, EMBEDDING), dim=1))

    @torch.no_grad()
    def keys(self, images: Tensor) -> Tensor:
        return F.normalize(self.encoder_k(images), dim=1)

    def forward(self, images: Tensor, keys: Tensor) -> Tensor:
        """InfoNCE of every query with its own key, and the keys in the queue."""
        queries = F.normalize(self.encoder_q(images), dim=1)
        positive = (queries * keys).sum(dim=1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.T], dim=1) / TEMPERATURE
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def loss(model: MoCo, batch: Batch) -> Tensor:
    return model(batch["query"], model.keys(batch["key"]))


def make_batch(generator: torch.Generator) -> Batch:
    images = torch.randn(IMAGES, PIXELS, generator=generator)
    noise = torch.randn(2, IMAGES, PIXELS, generator=generator)
    return {"query": images + 0.4 * noise[0], "key": images + 0.4 * noise[1]}


case = Case(model=MoCo, batch=make_batch, loss=loss, layout="1x3")


@torch.no_grad()
def concat_all_gather(tensor: Tensor) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


class BatchShuffle:
    """Deals the images of all ranks anew, and brings back what was computed of them."""

    def __init__(self, rank: Rank, seed: int = 7) -> None:
        self.rank = rank
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.empty(0, dtype=torch.long)

    def own_rows(self, order: Tensor) -> Tensor:
        return order.view(self.rank.world_size, -1)[self.rank]

    def shuffle(self, images: Tensor) -> Tensor:
        everything = concat_all_gather(images)
        self.order = torch.randperm(len(everything), generator=self.generator)
        return everything[self.own_rows(self.order)]

    def unshuffle(self, keys: Tensor) -> Tensor:
        gathered = concat_all_gather(keys)
        return gathered[self.own_rows(self.order)]


class Pretraining:
    def __init__(self, model: MoCo, rank: Rank) -> None:
        self.ddp = DistributedDataParallel(model)
        self.shuffling = BatchShuffle(rank)

    def training_step(self, batch: Batch) -> float:
        shuffled = self.shuffling.shuffle(batch["key"])
        keys = self.shuffling.unshuffle(self.ddp.module.keys(shuffled))
        objective = self.ddp(batch["query"], keys)
        objective.backward()
        return objective.item()


def step(model: MoCo, shard: Batch, rank: Rank) -> None:
    Pretraining(model, rank).training_step(shard)
