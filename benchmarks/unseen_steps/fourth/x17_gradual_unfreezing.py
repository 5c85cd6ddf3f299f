"""Fine-tuning that unfreezes an encoder layer by layer, as in ULMFiT."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH, CLASSES = 21, 10, 7, 3


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, kernel_size=3, padding=1)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.mix(self.norm(hidden).transpose(1, 2)).transpose(1, 2)
        return hidden + self.out(F.gelu(mixed))


class SentimentModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.classifier(hidden.mean(dim=1))

    def groups(self) -> list[nn.Module]:
        """What is unfrozen one after the other, the head first."""
        return [self.classifier, *reversed(self.layers), self.embed]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]), batch["labels"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "tokens": torch.randint(VOCAB, (16, LENGTH), generator=generator),
        "labels": torch.randint(CLASSES, (16,), generator=generator),
    }


@dataclass(frozen=True)
class FinetuneConfig:
    groups_at_start: int = 1
    groups_per_epoch: int = 1
    epochs_done: int = 3  # of a run that is resumed


class GradualUnfreezing:
    def __init__(self, model: SentimentModel, config: FinetuneConfig) -> None:
        self.model = model
        self.config = config

    def apply(self, epoch: int) -> None:
        trainable = self.config.groups_at_start + epoch * self.config.groups_per_epoch
        for number, group in enumerate(self.model.groups()):
            group.requires_grad_(number < trainable)


class Finetuner:
    def __init__(self, model: SentimentModel, config: FinetuneConfig) -> None:
        self.model = model
        self.config = config
        self.schedule = GradualUnfreezing(model, config)
        self.schedule.apply(epoch=0)
        self.ddp = DistributedDataParallel(model)
        self.epoch = 0

    def resume(self) -> None:
        self.epoch = self.config.epochs_done

    def on_epoch_start(self) -> None:
        self.schedule.apply(self.epoch)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        value = loss(self.ddp, batch)
        value.backward()
        return value.detach()


case = Case(model=SentimentModel, batch=make_batch, loss=loss, layout="1x2")


def step(model: SentimentModel, shard: dict[str, Tensor], rank) -> None:
    finetuner = Finetuner(model, FinetuneConfig())
    finetuner.resume()
    finetuner.on_epoch_start()
    finetuner.training_step(shard)
