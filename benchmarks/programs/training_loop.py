"""A training loop as users write it, in the settings that they train in.

``Setting`` says what it trains with. ``Whole`` and ``Prepared`` are the two forms of a step that
``check`` takes. Wrong programs subclass ``Loop``, and break one of its methods.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks.programs.common import OUTPUTS, ROW, Batch, Loss, mean_squared_error, mlp, part
from benchmarks.programs.wrappers import Clip, Ddp, Make, Wrapper
from ddp_equivalence import Rank

Schedule = Callable[[Optimizer], Any]
"""Makes the scheduler of an optimizer's learning rate."""


def plain_sgd(parameters: list[nn.Parameter]) -> Optimizer:
    """The optimizer of ``check`` where none is given."""
    return SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Examples:
    """Builds the batch: rows of numbers, and targets of the model's outputs."""

    count: int

    def __call__(self, generator: torch.Generator) -> Batch:
        return {
            "rows": torch.randn(self.count, ROW, generator=generator),
            "targets": torch.randn(self.count, OUTPUTS, generator=generator),
        }


@dataclass(frozen=True)
class Setting:
    """What a loop trains with.

    ``micro``: the micro-batches of each rank and step. ``batch``: makes the function that builds so
    many examples.
    """

    optimizer: Make
    wrapper: Callable[[nn.Module, Rank], Wrapper] = Ddp
    clip: Clip | None = None
    schedule: Schedule | None = None
    micro: int = 1
    steps: int = 1
    model: Callable[[], nn.Module] = mlp
    batch: Callable[[int], Callable[[torch.Generator], Batch]] = Examples
    loss: Loss = mean_squared_error

    def steppers(self, parameters: list[nn.Parameter]) -> list[Any]:
        """The optimizer, and its scheduler if there is one, as ``check(optimizer=)`` takes them."""
        optimizer = self.optimizer(parameters)
        return [optimizer, self.schedule(optimizer)] if self.schedule else [optimizer]


class Loop:
    """Trains a model, one step for each call."""

    def __init__(self, setting: Setting, model: nn.Module, rank: Rank) -> None:
        self.setting, self.rank, self.number = setting, rank, 0
        self.wrapper = setting.wrapper(model, rank)
        self.optimizer = self.wrapper.optimizer(setting.optimizer)
        self.schedule = setting.schedule(self.optimizer) if setting.schedule else None

    def __call__(self, examples: Batch) -> None:
        self.clear()
        micro_batches = self.micro_batches(examples)
        for index, each in enumerate(micro_batches):
            with self.synchronised(index, len(micro_batches)):
                self.backward(self.loss(each), len(micro_batches))
        self.reduce()
        self.clip()
        self.optimizer.step()
        if self.schedule:
            self.schedule.step()
        self.number += 1

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def micro_batches(self, examples: Batch) -> list[Batch]:
        return split(examples, self.setting.micro)

    def synchronised(self, index: int, count: int) -> AbstractContextManager[Any]:
        """DDP reduces in the last micro-batch only."""
        return self.wrapper.no_sync() if index < count - 1 else nullcontext()

    def loss(self, examples: Batch) -> Tensor:
        return self.setting.loss(self.wrapper.module, examples)

    def backward(self, loss: Tensor, count: int) -> None:
        (loss / count).backward()

    def reduce(self) -> None:
        self.wrapper.reduce()

    def clip(self) -> None:
        if self.setting.clip:
            self.wrapper.clip(self.setting.clip)


@dataclass(frozen=True)
class Whole:
    """The step that is called once, with the rank's examples of all big batches."""

    setting: Setting
    loop: Callable[[Setting, nn.Module, Rank], Loop] = Loop

    def __call__(self, model: nn.Module, shard: Batch, rank: Rank) -> None:
        loop = self.loop(self.setting, model, rank)
        for examples in split(shard, self.setting.steps):
            loop(examples)


@dataclass(frozen=True)
class Prepared:
    """The step whose wrapper and optimizer are made once, and which is called for each batch."""

    setting: Setting
    loop: Callable[[Setting, nn.Module, Rank], Loop] = Loop

    def __call__(self, model: nn.Module, rank: Rank) -> Loop:
        return self.loop(self.setting, model, rank)


def split(examples: Batch, count: int) -> list[Batch]:
    """The examples in so many equal pieces."""
    size = len(examples["rows"]) // count
    return [part(examples, start, start + size) for start in range(0, size * count, size)]


def fields_of(setting: Setting) -> dict[str, Any]:
    """The fields of a program with this setting: its model, its batch, and how it is checked."""
    fields: dict[str, Any] = {"compare": "update", "model": setting.model, "steps": setting.steps}
    fields |= {"batch": setting.batch(24 * setting.steps), "loss": setting.loss}
    if setting.optimizer is not plain_sgd or setting.schedule:
        fields["optimizer"] = setting.steppers
    if setting.clip:
        fields["clip"] = setting.clip.norm or setting.clip
    return fields
