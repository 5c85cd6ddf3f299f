"""Image classification with an additional loss: features should not change under a flip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


@dataclass
class LossWeights:
    classification: float = 1.0
    invariance: float = 0.8


class PatchNet(nn.Module):
    """A patch embedding and two mixer layers, as in MLP-Mixer."""

    def __init__(self, width: int = 10, patches: int = 9, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, kernel_size=2, stride=2)
        self.norm = nn.LayerNorm(width)
        self.over_patches = nn.Sequential(nn.Linear(patches, 12), nn.GELU(), nn.Linear(12, patches))
        self.over_channels = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))
        self.classify = nn.Linear(width, classes)

    def features(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        x = x + self.over_patches(self.norm(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.over_channels(self.norm(x))
        return x.mean(dim=1)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images))


def images(generator: torch.Generator) -> Batch:
    return {
        "images": torch.randn(16, 3, 6, 6, generator=generator),
        "labels": torch.randint(4, (16,), generator=generator),
    }


def flip_invariance(model: PatchNet, pixels: Tensor) -> Tensor:
    """One minus the cosine between the features of an image and those of its mirror image."""
    mirrored = torch.flip(pixels, dims=(-1,))
    similarity = F.cosine_similarity(model.features(pixels), model.features(mirrored))
    return (1 - similarity).mean()


def loss(model: PatchNet, batch: Batch) -> Tensor:
    weights = LossWeights()
    classification = F.cross_entropy(model(batch["images"]), batch["labels"])
    invariance = flip_invariance(model, batch["images"])
    return weights.classification * classification + weights.invariance * invariance


class Trainer:
    def __init__(self, model: PatchNet, weights: LossWeights) -> None:
        self.ddp = DistributedDataParallel(model)
        self.weights = weights
        self.logs: dict[str, float] = {}

    def classification_loss(self, batch: Batch) -> Tensor:
        value = F.cross_entropy(self.ddp(batch["images"]), batch["labels"])
        self.logs["classification"] = value.item()
        return self.weights.classification * value

    def invariance_loss(self, batch: Batch) -> Tensor:
        value = flip_invariance(self.ddp.module, batch["images"])
        self.logs["invariance"] = value.item()
        return self.weights.invariance * value

    def training_step(self, batch: Batch) -> None:
        self.classification_loss(batch).backward()
        self.invariance_loss(batch).backward()


case = Case(model=PatchNet, batch=images, loss=loss, layout="2x2")


def step(model: PatchNet, shard: Batch, rank: Rank) -> None:
    Trainer(model, LossWeights()).training_step(shard)
