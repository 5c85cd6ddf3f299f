"""CLIP with the memory-saving loss: every rank scores its own pairs against those of all ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

IMAGE_DIM, TEXT_DIM, EMBED_DIM, PAIRS = 14, 9, 8, 16


class Tower(nn.Module):
    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(in_features, 20), nn.GELU())
        self.proj = nn.Linear(20, EMBED_DIM, bias=False)

    def forward(self, x):
        return F.normalize(self.proj(self.trunk(x)), dim=-1)


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual = Tower(IMAGE_DIM)
        self.textual = Tower(TEXT_DIM)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images, texts):
        return self.visual(images), self.textual(texts), self.logit_scale.exp()


class ClipLoss(nn.Module):
    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = world_size
        self._labels: dict[int, torch.Tensor] = {}

    def gather(self, features):
        if self.world_size == 1:
            return features
        return torch.cat(dist_fn.all_gather(features), dim=0)

    def get_ground_truth(self, num_logits: int) -> torch.Tensor:
        if num_logits not in self._labels:
            self._labels[num_logits] = torch.arange(num_logits, dtype=torch.long)
        return self._labels[num_logits]

    def get_logits(self, image_features, text_features, logit_scale):
        all_images = self.gather(image_features)
        all_texts = self.gather(text_features)
        per_image = logit_scale * image_features @ all_texts.T
        per_text = logit_scale * text_features @ all_images.T
        return per_image, per_text

    def forward(self, image_features, text_features, logit_scale):
        per_image, per_text = self.get_logits(image_features, text_features, logit_scale)
        labels = self.get_ground_truth(per_image.shape[0])
        return (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2


def make_batch(generator):
    latent = torch.randn(PAIRS, 6, generator=generator)
    to_image = torch.randn(6, IMAGE_DIM, generator=generator)
    to_text = torch.randn(6, TEXT_DIM, generator=generator)
    return {"images": latent @ to_image, "texts": latent @ to_text}


def clip_loss(model, batch):
    return ClipLoss()(*model(batch["images"], batch["texts"]))


case = Case(model=CLIP, batch=make_batch, loss=clip_loss, layout="2x2")


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    criterion = ClipLoss(rank=dist.get_rank(), world_size=dist.get_world_size())
    loss = criterion(*ddp(shard["images"], shard["texts"]))
    loss.backward()
