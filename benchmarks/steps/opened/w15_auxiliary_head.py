"""A classifier with an auxiliary head for training, and a sanity validation before the first step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CHANNELS, CLASSES, SIZE, IMAGES = 3, 5, 8, 12
AUX_WEIGHT = 0.4


class InceptionLike(nn.Module):
    """Returns (logits, auxiliary logits) while training, and logits alone otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, 8, 3, padding=1)
        self.mixed = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, CLASSES)
        self.aux_fc = nn.Linear(8, CLASSES)

    def forward(self, images):
        early = F.relu(self.stem(images))
        late = F.relu(self.mixed(F.avg_pool2d(early, 2)))
        logits = self.fc(late.mean(dim=(2, 3)))
        if not self.training:
            return logits
        return logits, self.aux_fc(early.mean(dim=(2, 3)))


def criterion(outputs, labels):
    if isinstance(outputs, tuple):
        logits, auxiliary = outputs
        return F.cross_entropy(logits, labels) + AUX_WEIGHT * F.cross_entropy(auxiliary, labels)
    return F.cross_entropy(outputs, labels)


def make_batch(generator):
    return {
        "images": torch.randn(IMAGES, CHANNELS, SIZE, SIZE, generator=generator),
        "labels": torch.randint(CLASSES, (IMAGES,), generator=generator),
    }


def training_loss(model, batch):
    return criterion(model(batch["images"]), batch["labels"])


case = Case(model=InceptionLike, batch=make_batch, loss=training_loss, layout="1x3")


def is_main_process() -> bool:
    return dist.get_rank() == 0


class Evaluator:
    """Accuracy of the unwrapped model, computed by one process while the others wait."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.inference_mode()
    def accuracy(self, batch) -> float:
        self.model.eval()
        predicted = self.model(batch["images"]).argmax(dim=1)
        return (predicted == batch["labels"]).double().mean().item()


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        self.ddp = DistributedDataParallel(model, find_unused_parameters=True)
        self.evaluator = Evaluator(model)
        self.history: list[dict[str, float]] = []

    def sanity_check(self, batch) -> None:
        if is_main_process():
            self.history.append({"accuracy": self.evaluator.accuracy(batch)})
        dist.barrier()

    def fit(self, batches) -> None:
        self.sanity_check(batches[0])
        for batch in batches:
            loss = criterion(self.ddp(batch["images"]), batch["labels"])
            loss.backward()
            self.history.append({"loss": loss.item()})


def step(model, shard, rank):
    Trainer(model).fit([shard])
