"""Distillation from stored outputs of a teacher: labels, soft targets and a layer of features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLASSES, WIDTH = 6, 8

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class DistillationConfig:
    temperature: float = 2.0
    alpha: float = 0.6
    hint_weight: float = 0.4
    micro_batch: int = 2


CONFIG = DistillationConfig()


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.features = nn.Linear(54, WIDTH)
        self.classify = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(self.stem(images))
        return self.classify(F.relu(features)), features


def images_and_cache(generator: torch.Generator) -> Batch:
    return {
        "images": torch.randn(16, 3, 8, 8, generator=generator),
        "labels": torch.randint(CLASSES, (16,), generator=generator),
        "cached_logits": 3 * torch.randn(16, CLASSES, generator=generator),
        "cached_features": torch.randn(16, WIDTH, generator=generator),
    }


def distill(
    outputs: tuple[Tensor, Tensor], labels: Tensor, teacher: tuple[Tensor, Tensor]
) -> Tensor:
    logits, features = outputs
    hot = CONFIG.temperature
    student, target = (logits / hot).log_softmax(dim=-1), (teacher[0] / hot).softmax(dim=-1)
    soft = F.kl_div(student, target, reduction="batchmean") * hot**2
    hint = F.mse_loss(features, teacher[1])
    hard = F.cross_entropy(logits, labels)
    return (1 - CONFIG.alpha) * hard + CONFIG.alpha * soft + CONFIG.hint_weight * hint


def loss(model: nn.Module, batch: Batch) -> Tensor:
    teacher = batch["cached_logits"], batch["cached_features"]
    return distill(model(batch["images"]), batch["labels"], teacher)


class TeacherCache:
    """What the teacher said, in the order of the data set, read in step with the training."""

    def __init__(self, batch: Batch, start: int = 0) -> None:
        self.logits, self.features = batch["cached_logits"], batch["cached_features"]
        self.position = start

    def next(self, count: int) -> tuple[Tensor, Tensor]:
        chosen = slice(self.position, self.position + count)
        self.position += count
        return self.logits[chosen], self.features[chosen]


class Distiller:
    def __init__(self, model: nn.Module, cache: TeacherCache) -> None:
        self.ddp = DistributedDataParallel(model)
        self.cache = cache

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        micro_batches = len(images) // CONFIG.micro_batch
        total = images.new_zeros(())
        for pixels, classes in zip(
            images.chunk(micro_batches), labels.chunk(micro_batches), strict=True
        ):
            teacher = self.cache.next(len(pixels))
            total = total + distill(self.ddp(pixels), classes, teacher)
        (total / micro_batches).backward()


case = Case(
    model=Student,
    batch=images_and_cache,
    loss=loss,
    layout="2x2",
    batch_dims={"cached_logits": None, "cached_features": None},
)


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    cache = TeacherCache(shard)
    Distiller(model, cache).train_step(shard["images"], shard["labels"])
