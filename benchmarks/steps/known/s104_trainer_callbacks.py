"""A trainer with callbacks, which normalise gradients, watch them and write a log."""

import contextlib
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


class Callback:
    """Has a method for each event that it wants to see."""


class NormaliseAccumulated(Callback):
    """Losses are added up while gradients accumulate; this makes a mean of them."""

    def after_backward(self, trainer: "Trainer") -> None:
        for p in trainer.parameters:
            p.grad.div_(trainer.accumulate)


class GradientMonitor(Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def before_optimizer_step(self, trainer: "Trainer") -> None:
        self.norms.append(float(nn.utils.get_total_norm([p.grad for p in trainer.parameters])))


class LossLog(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def after_loss(self, trainer: "Trainer") -> None:
        self.values.append(float(trainer.value.detach()))


class Trainer:
    def __init__(self, model: nn.Module, accumulate: int, callbacks: Iterable[Callback]) -> None:
        self.model = DistributedDataParallel(model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.accumulate = accumulate
        self.callbacks = list(callbacks)

    def fire(self, event: str) -> None:
        for callback in self.callbacks:
            if handler := getattr(callback, event, None):
                handler(self)

    def fit_window(self, batch: dict[str, Tensor]) -> None:
        for index in range(self.accumulate):
            part = {key: value[index :: self.accumulate] for key, value in batch.items()}
            last = index == self.accumulate - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                self.value = loss(self.model, part)
                self.fire("after_loss")
                self.value.backward()
            self.fire("after_backward")
        self.fire("before_optimizer_step")


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 5, 3), nn.GroupNorm(1, 5), nn.GELU(), nn.Flatten(), nn.Linear(30, 4)
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["signal"]), batch["label"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "signal": torch.randn(24, 2, 8, generator=generator),
        "label": torch.randint(0, 4, (24,), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    callbacks = [LossLog(), NormaliseAccumulated(), GradientMonitor()]
    Trainer(model, accumulate=3, callbacks=callbacks).fit_window(shard)
