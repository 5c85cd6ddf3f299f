"""Training loops with one thing wrong each. The docstring says what."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.programs.common import Batch, part
from benchmarks.programs.training_loop import Loop, Setting
from ddp_equivalence import Rank


def nothing(loop: Loop) -> None:
    """Stands for a method that is missing."""


class DropsTheLastExample(Loop):
    """Every rank leaves out the last of its examples."""

    def micro_batches(self, examples: Batch) -> list[Batch]:
        return super().micro_batches(part(examples, 0, len(examples["rows"]) - self.setting.micro))


class DropsOnOneRank(Loop):
    """The last rank leaves out half of its examples."""

    def micro_batches(self, examples: Batch) -> list[Batch]:
        count = len(examples["rows"])
        last = self.rank.rank == self.rank.world_size - 1
        return super().micro_batches(part(examples, 0, count // 2 if last else count))


class Overlaps(Loop):
    """Every rank takes two examples more than its share."""

    def micro_batches(self, examples: Batch) -> list[Batch]:
        size = len(examples["rows"]) // self.rank.world_size
        start = min(size * self.rank, len(examples["rows"]) - size - 2)
        return super().micro_batches(part(examples, start, start + size + 2))


class ShufflesApart(Loop):
    """Every rank takes its share of an order of its own."""

    def micro_batches(self, examples: Batch) -> list[Batch]:
        order = torch.randperm(len(examples["rows"]))[self.rank.rank :: self.rank.world_size]
        return super().micro_batches({name: leaf[order] for name, leaf in examples.items()})


class SumsLosses(Loop):
    """The loss is the sum over the rank's examples."""

    def loss(self, examples: Batch) -> Tensor:
        return super().loss(examples) * len(examples["rows"])


class TimesWorldSize(Loop):
    """The loss is multiplied by the world size, although gradients are averaged."""

    def loss(self, examples: Batch) -> Tensor:
        return super().loss(examples) * self.rank.world_size


class DividesByWorldSize(Loop):
    """The loss is divided by the world size, although gradients are averaged."""

    def loss(self, examples: Batch) -> Tensor:
        return super().loss(examples) / self.rank.world_size


class ForgetsToUnscale(Loop):
    """The loss is multiplied by 1024, and nothing divides the gradients by it."""

    def loss(self, examples: Batch) -> Tensor:
        return super().loss(examples) * 1024


class DoesNotDivide(Loop):
    """The losses of micro-batches are added up."""

    def backward(self, loss: Tensor, count: int) -> None:
        loss.backward()


class ClearsInside(Loop):
    """Gradients are cleared before every micro-batch."""

    def backward(self, loss: Tensor, count: int) -> None:
        self.optimizer.zero_grad()
        super().backward(loss, count)


class NeverClears(Loop):
    """Nothing clears the gradients between the steps."""

    clear = nothing


class NeverSynchronises(Loop):
    """The no_sync of DDP encloses every micro-batch."""

    def synchronised(self, index: int, count: int) -> AbstractContextManager[Any]:
        return self.wrapper.no_sync()


class SynchronisesFirst(Loop):
    """DDP reduces in the first micro-batch, not in the last."""

    def synchronised(self, index: int, count: int) -> AbstractContextManager[Any]:
        return self.wrapper.no_sync() if index > 0 else nullcontext()


class CallsTheBareModel(Loop):
    """The model is called, not its DDP."""

    def loss(self, examples: Batch) -> Tensor:
        return self.setting.loss(self.wrapper.module.module, examples)


class ClipsEveryMicroBatch(Loop):
    """Gradients are clipped after every micro-batch, each time averaged by DDP."""

    def backward(self, loss: Tensor, count: int) -> None:
        super().backward(loss, count)
        super().clip()

    clip = nothing


class ClipsEachParameter(Loop):
    """Every parameter's gradient is clipped by its own norm."""

    def clip(self) -> None:
        assert self.setting.clip is not None
        assert self.setting.clip.norm is not None
        for parameter in self.wrapper.module.parameters():
            clip_grad_norm_([parameter], self.setting.clip.norm)


class StartsApart(Loop):
    """The ranks begin with different weights, which nothing broadcasts."""

    def __init__(self, setting: Setting, model: nn.Module, rank: Rank) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * rank.rank)
        super().__init__(setting, model, rank)


class NeverSteps(Loop):
    """The optimizer is made, and never steps."""

    def __call__(self, examples: Batch) -> None:
        self.clear()
        self.backward(self.loss(examples), 1)
        self.reduce()


class RaisesTheRate(Loop):
    """The rate is a hundredth higher than that of the big batch."""

    def clip(self) -> None:
        super().clip()
        for group in self.optimizer.param_groups:
            group["lr"] *= 1.01


class ForgetsTheSchedule(Loop):
    """The scheduler is made, and never steps."""

    def __init__(self, setting: Setting, model: nn.Module, rank: Rank) -> None:
        super().__init__(setting, model, rank)
        self.schedule = None


class ShrinksWeights(Loop):
    """After every step, the weights are drawn a thousandth of the way towards zero."""

    def __call__(self, examples: Batch) -> None:
        super().__call__(examples)
        with torch.no_grad():
            for parameter in self.wrapper.module.parameters():
                parameter.mul_(0.999)
