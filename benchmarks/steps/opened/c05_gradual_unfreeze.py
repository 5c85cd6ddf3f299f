"""Transfer learning for plant photos: the head first, then the backbone from its top down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass
class Schedule:
    epoch: int = 3
    unfreeze_all_at: int = 2
    smoothing: float = 0.1


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.block = nn.Conv2d(6, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.block(F.relu(self.stem(x)))).mean(dim=(2, 3))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.backbone(x)))


def photos(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.randn(8, 3, 8, 8, generator=generator),
        torch.randint(5, (8,), generator=generator),
    )


def loss(model: nn.Module, batch, smoothing: float = Schedule.smoothing) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, label_smoothing=smoothing)


case = Case(model=Classifier, batch=photos, loss=loss, layout="1x2")


def set_trainable(module: nn.Module, trainable: bool) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(trainable)


class FineTuner:
    def __init__(self, net: Classifier, schedule: Schedule) -> None:
        self.net, self.schedule = net, schedule
        set_trainable(net.backbone, False)

    def on_epoch_start(self, epoch: int) -> None:
        if epoch >= self.schedule.unfreeze_all_at:
            set_trainable(self.net.backbone, True)

    def fit_one(self, batch) -> None:
        wrapped = DistributedDataParallel(self.net)
        self.on_epoch_start(self.schedule.epoch)
        loss(wrapped, batch, self.schedule.smoothing).backward()


def step(model, shard, rank):
    FineTuner(model, Schedule()).fit_one(shard)
