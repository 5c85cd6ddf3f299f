"""Fine-tuning: the head alone at first, the whole network from some epoch on; runs can resume."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass(frozen=True)
class FinetuneConfig:
    patches: int = 6
    patch_dim: int = 8
    width: int = 12
    classes: int = 5
    unfreeze_epoch: int = 3
    resume_epoch: int = 5


CONFIG = FinetuneConfig()
IMAGES = 18


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.tokens = nn.Linear(patches, patches)
        self.channels = nn.Linear(width, width)

    def forward(self, x):
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + F.gelu(self.channels(x))


class Backbone(nn.Module):
    def __init__(self, config: FinetuneConfig) -> None:
        super().__init__()
        self.embed = nn.Linear(config.patch_dim, config.width)
        self.block = MixerBlock(config.patches, config.width)

    def forward(self, patches):
        return self.block(self.embed(patches)).mean(dim=1)


class Finetuned(nn.Module):
    def __init__(self, config: FinetuneConfig = CONFIG) -> None:
        super().__init__()
        self.backbone = Backbone(config)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, patches):
        return self.head(self.backbone(patches))


def make_batch(generator):
    return {
        "patches": torch.randn(IMAGES, CONFIG.patches, CONFIG.patch_dim, generator=generator),
        "labels": torch.randint(CONFIG.classes, (IMAGES,), generator=generator),
    }


def classification_loss(model, batch):
    return F.cross_entropy(model(batch["patches"]), batch["labels"], label_smoothing=0.1)


case = Case(model=Finetuned, batch=make_batch, loss=classification_loss, layout="1x3")


class FinetuneTrainer:
    def __init__(self, model: Finetuned, config: FinetuneConfig) -> None:
        self.model, self.config = model, config
        self.epoch = 0
        self.setup()

    def setup(self) -> None:
        self.model.backbone.requires_grad_(False)
        self.load_progress()
        self.ddp = DistributedDataParallel(self.model)

    def load_progress(self) -> None:
        self.epoch = self.config.resume_epoch

    def on_epoch_start(self) -> None:
        """Once the head has settled, the backbone learns as well."""
        if self.epoch >= self.config.unfreeze_epoch:
            self.model.backbone.requires_grad_(True)

    def run_epoch(self, batches) -> list[float]:
        self.on_epoch_start()
        losses = []
        for batch in batches:
            loss = classification_loss(self.ddp, batch)
            loss.backward()
            losses.append(loss.item())
        self.epoch += 1
        return losses


def step(model, shard, rank):
    FinetuneTrainer(model, CONFIG).run_epoch([shard])
