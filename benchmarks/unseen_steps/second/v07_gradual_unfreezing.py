"""Transfer learning: the head alone at first, the deeper stages of the backbone later."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class FineTuneConfig:
    label_smoothing: float = 0.1
    unfreeze_at: dict[str, int] = field(default_factory=lambda: {"stage2": 1, "stage1": 2})


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.second(F.relu(self.first(x)))))


class Classifier(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.stage1 = Residual(4)
        self.stage2 = Residual(4)
        self.head = nn.Linear(4, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stage2(self.stage1(self.stem(images)))
        return self.head(features.mean(dim=(2, 3)))


def photographs(generator: torch.Generator) -> Batch:
    return {
        "images": torch.randn(12, 3, 6, 6, generator=generator),
        "labels": torch.randint(5, (12,), generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["images"])
    return F.cross_entropy(logits, batch["labels"], label_smoothing=FineTuneConfig.label_smoothing)


def build_model() -> nn.Module:
    """As it is in the epochs in which both stages are trained: only the stem stays frozen."""
    model = Classifier()
    model.stem.requires_grad_(False)
    return model


class FineTuner:
    def __init__(self, model: Classifier, config: FineTuneConfig) -> None:
        self.config = config
        self.model = model
        for name in config.unfreeze_at:
            model.get_submodule(name).requires_grad_(False)
        self.ddp = DistributedDataParallel(model)

    def start_epoch(self, epoch: int) -> None:
        for name, first in self.config.unfreeze_at.items():
            if epoch >= first:
                self.model.get_submodule(name).requires_grad_(True)

    def train_batch(self, batch: Batch) -> float:
        value = loss(self.ddp, batch)
        value.backward()
        return value.item()


case = Case(model=build_model, batch=photographs, loss=loss, layout="1x3")


def step(model: Classifier, shard: Batch, rank: Rank) -> None:
    tuner = FineTuner(model, FineTuneConfig())
    tuner.start_epoch(2)
    tuner.train_batch(shard)
