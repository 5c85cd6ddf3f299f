"""A recurrent model of characters: warm-up, cosine decay, accumulation, and a config object."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass
class Config:
    characters: int = 20
    length: int = 9
    width: int = 8
    lr: float = 0.5
    steps: int = 4
    warmup: int = 2
    accumulate: int = 2
    rows_per_step: int = 8


CONFIG = Config()


class CharacterModel(nn.Module):
    def __init__(self, config: Config = CONFIG) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.characters, config.width)
        self.recurrent = nn.GRU(config.width, config.width, batch_first=True)
        self.head = nn.Linear(config.width, config.characters)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(text))[0])


def text(generator: torch.Generator) -> Tensor:
    rows = CONFIG.steps * CONFIG.rows_per_step
    return torch.randint(0, CONFIG.characters, (rows, CONFIG.length), generator=generator)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def factor(number: int) -> float:
    """The learning rate of optimizer step ``number``, as a part of the peak."""
    if number < CONFIG.warmup:
        return (number + 1) / (CONFIG.warmup + 1)
    progress = (number - CONFIG.warmup) / (CONFIG.steps - CONFIG.warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def optimizer_and_schedule(parameters):
    optimizer = torch.optim.SGD(parameters, lr=CONFIG.lr, momentum=0.5)
    return [optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)]


class Loop:
    def __init__(self, model: nn.Module, rank) -> None:
        self.ddp = DistributedDataParallel(model)
        self.optimizer, self.schedule = optimizer_and_schedule(list(self.ddp.parameters()))
        self.number = 0

    def __call__(self, batch: Tensor) -> None:
        for micro in batch.chunk(CONFIG.accumulate):
            self.on_micro_batch(micro)

    def on_micro_batch(self, micro: Tensor) -> None:
        self.number += 1
        self.ddp.require_backward_grad_sync = self.number % CONFIG.accumulate == 0
        (loss(self.ddp, micro) / CONFIG.accumulate).backward()
        if self.ddp.require_backward_grad_sync:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.schedule.step()


case = Case(model=CharacterModel, batch=text, loss=loss, layout="1x2")
step = Loop
options = {
    "compare": "update",
    "steps": CONFIG.steps,
    "optimizer": optimizer_and_schedule,
}
