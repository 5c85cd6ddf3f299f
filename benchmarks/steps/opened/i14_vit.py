"""A small vision transformer with linear warm-up; callbacks do what is not the model's business."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

PATCH, WIDTH, CLASSES, STEPS = 4, 8, 5, 3
WARMUP = 8


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.register = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.register.expand(len(x), -1, -1), x], dim=1)
        return self.head(self.block(x)[:, 0])


def images(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "images": torch.rand(8 * STEPS, 3, 8, 8, generator=generator),
        "labels": torch.randint(CLASSES, (8 * STEPS,), generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"], label_smoothing=0.05)


def optimizer_and_schedule(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    return [
        optimizer,
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / WARMUP)),
    ]


class Callback:
    def after_step(self, trainer: Trainer) -> None: ...


class Schedule(Callback):
    """Moves the learning rate on; the schedule is written in batches of the whole job."""

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.scheduler = scheduler

    def after_step(self, trainer: Trainer) -> None:
        for _ in range(trainer.processes):
            self.scheduler.step()


class History(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def after_step(self, trainer: Trainer) -> None:
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])


class Trainer:
    def __init__(self, model: nn.Module, processes: int) -> None:
        self.model = DistributedDataParallel(model)
        self.processes = processes
        self.optimizer, scheduler = optimizer_and_schedule(self.model.parameters())
        self.callbacks = [Schedule(scheduler), History()]

    def fit(self, batches) -> None:
        for pixels, labels in batches:
            self.optimizer.zero_grad()
            loss(self.model, {"images": pixels, "labels": labels}).backward()
            self.optimizer.step()
            for callback in self.callbacks:
                callback.after_step(self)


def step(model, shard, rank):
    trainer = Trainer(model, rank.world_size)
    trainer.fit(zip(shard["images"].chunk(STEPS), shard["labels"].chunk(STEPS)))


case = Case(model=ViT, batch=images, loss=loss)
options = {"compare": "update", "steps": STEPS, "optimizer": optimizer_and_schedule}
