"""Contrastive pre-training of an image and a text encoder: every row is compared with those of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

PIXELS, TOKENS, WORDS, DIM = 10, 5, 17, 6


@dataclass
class ContrastiveConfig:
    keep_gradients: bool = False  # send gradients back to the ranks that rows came from
    reshard: bool = True


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(PIXELS, 15), nn.GELU(), nn.Linear(15, DIM))
        self.text = nn.Sequential(nn.EmbeddingBag(WORDS, 7, mode="mean"), nn.Linear(7, DIM))
        self.temperature = nn.Parameter(torch.tensor([1.5]))

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = F.normalize(self.image(images), dim=1), F.normalize(self.text(tokens), dim=1)
        return *rows, self.temperature.exp()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    images, texts, scale = model(batch["images"], batch["tokens"])
    scores = scale * images @ texts.T
    labels = torch.arange(len(scores))
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


def captions(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": torch.randn(12, PIXELS, generator=generator),
        "tokens": torch.randint(WORDS, (12, TOKENS), generator=generator),
    }


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor) -> Tensor:
        ctx.count = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        first = dist.get_rank() * ctx.count
        return gradient[first : first + ctx.count]


class ContrastiveLoss:
    def __init__(self, config: ContrastiveConfig) -> None:
        self.config, self.rank, self.world = config, dist.get_rank(), dist.get_world_size()

    def gather(self, rows: Tensor) -> Tensor:
        if self.config.keep_gradients:
            return GatherRows.apply(rows)
        parts = [torch.empty_like(rows) for _ in range(self.world)]
        dist.all_gather(parts, rows.detach().contiguous())
        parts[self.rank] = rows
        return torch.cat(parts)

    def __call__(self, images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        """Own images against all texts, and own texts against all images."""
        all_images, all_texts = self.gather(images), self.gather(texts)
        labels = self.rank * len(images) + torch.arange(len(images))
        to_texts = F.cross_entropy(scale * images @ all_texts.T, labels)
        to_images = F.cross_entropy(scale * texts @ all_images.T, labels)
        return (to_texts + to_images) / 2


def step(model, shard, rank):
    config = ContrastiveConfig()
    for encoder in (model.image, model.text):
        fully_shard(encoder, reshard_after_forward=config.reshard)
    fully_shard(model)
    criterion = ContrastiveLoss(config)
    criterion(*model(shard["images"], shard["tokens"])).backward()


case = Case(model=Clip, batch=captions, loss=loss, layout="1x2")
