"""Trainers as users write them: one for all steps, and one that is prepared once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from ddp_equivalence import Rank
from tests.package.own_cases import loss

STEPS = 3
CLIP = 0.5


def adamw(parameters: list[nn.Parameter]) -> AdamW:
    return AdamW(parameters, lr=0.01, weight_decay=0.1)


def momentum_with_schedule(model: nn.Module) -> list[Any]:
    by_size = [
        {"params": [one for one in model.parameters() if one.ndim == 1], "weight_decay": 0.0},
        {"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": 0.1},
    ]
    optimizer = SGD(by_size, lr=0.1, momentum=0.9, nesterov=True)
    return [optimizer, StepLR(optimizer, step_size=1, gamma=0.5)]


def rows_of_step(shard: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: leaf[rows] for name, leaf in shard.items()}


class Trainer:
    """Trains for all steps on the examples of the rank. Subclasses break one thing each."""

    shuffles = False

    def __call__(self, model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        optimizer = adamw(list(ddp.parameters()))
        count = len(shard["rows"])
        order = torch.randperm(count) if self.shuffles else torch.arange(count)
        for step, rows in enumerate(order.split(count // STEPS)):
            optimizer.zero_grad()
            self.before_backward(step, ddp)
            self.loss(step, ddp, rows_of_step(shard, rows)).backward()
            clip_grad_norm_(ddp.parameters(), CLIP)
            self.before_step(step, optimizer)
            optimizer.step()
        self.at_the_end(ddp)

    def loss(self, step: int, ddp: nn.Module, examples: dict[str, Tensor]) -> Tensor:
        return loss(ddp, examples)

    def before_backward(self, step: int, ddp: DistributedDataParallel) -> None: ...

    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None: ...

    def at_the_end(self, ddp: nn.Module) -> None: ...


class Shuffles(Trainer):
    shuffles = True


class DropsExamplesLater(Trainer):
    def loss(self, step: int, ddp: nn.Module, examples: dict[str, Tensor]) -> Tensor:
        rows = torch.arange(len(examples["rows"]) - (step > 0))
        return loss(ddp, rows_of_step(examples, rows))


class ShufflesAndDropsExamples(Shuffles):
    def loss(self, step: int, ddp: nn.Module, examples: dict[str, Tensor]) -> Tensor:
        rows = torch.arange(len(examples["rows"]) - 1)
        return loss(ddp, rows_of_step(examples, rows))


class DoublesTheRateLater(Trainer):
    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] *= 1 + step


class StepsTwice(Trainer):
    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
            loss(self.ddp, self.examples).backward()

    def loss(self, step: int, ddp: nn.Module, examples: dict[str, Tensor]) -> Tensor:
        self.ddp, self.examples = ddp, examples
        return loss(ddp, examples)


class ChangesWeightsAtTheEnd(Trainer):
    def at_the_end(self, ddp: nn.Module) -> None:
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.mul_(1.01)


class NeverSteps:
    def __call__(self, model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        loss(DistributedDataParallel(model), shard).backward()


class Prepared:
    """Wraps the model once, and keeps wrapper and optimizer through all steps."""

    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.ddp = DistributedDataParallel(model)
        self.optimizer, self.schedule = momentum_with_schedule(model)

    def __call__(self, shard: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        loss(self.ddp, shard).backward()
        self.optimizer.step()
        self.schedule.step()
