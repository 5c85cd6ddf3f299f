"""Wrong programs that train with the trainers of libraries."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.programs.common import Batch, mean_squared_error
from benchmarks.programs.library_trainers import (
    MISSING,
    PaddedTexts,
    Training,
    WithLoss,
    accelerate_step,
    fabric_step,
    gpt2,
    lightning_step,
    returned_loss,
    transformers_step,
)
from benchmarks.programs.program import Programs, spelled
from benchmarks.programs.right.trainers import Accumulates, AccumulatesWithFabric

programs = Programs("trainers", right=False)

MOMENTUM = Training(partial(SGD, lr=0.1, momentum=0.9), accumulation=2)
WITH_LOSS = replace(MOMENTUM, model=WithLoss, loss=returned_loss)


class TimesWorldSize(Accumulates):
    """The loss is multiplied by the world size, although gradients are averaged."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) * dist.get_world_size()


class CallsTheBareModel(Accumulates):
    """The model is called without its wrapper."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model.module, batch)  # type: ignore[arg-type]


class Sums(Accumulates):
    """The loss is the sum over the examples of a micro-batch."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) * len(batch["rows"])


class DropsAnExample(Accumulates):
    """The last example of every micro-batch is left out."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, {name: leaf[:-1] for name, leaf in batch.items()})


class BackwardOfItsOwn(Accumulates):
    """The loss goes backward by itself, so that Accelerate does not divide it."""

    def __call__(self, accelerator: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                self.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()


class NeverSteps(Accumulates):
    """The optimizer never steps."""

    def __call__(self, accelerator: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for batch in loader:
            accelerator.backward(self.loss(model, batch))


class NotDivided(AccumulatesWithFabric):
    """The losses of the micro-batches are added up."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return mean_squared_error(model, batch)


class BareBackward(AccumulatesWithFabric):
    """The module inside the wrapper is called, so that its gradients are not reduced."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model.module, batch)  # type: ignore[arg-type]


def loss_times_world_size(model: nn.Module, batch: Batch) -> Tensor:
    """The loss is multiplied by the world size, although gradients are averaged."""
    return mean_squared_error(model, batch) * dist.get_world_size()


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss is the sum over the examples of a micro-batch."""
    return mean_squared_error(model, batch) * len(batch["rows"])


def loss_without_the_last(model: nn.Module, batch: Batch) -> Tensor:
    """The last example of every micro-batch is left out."""
    return mean_squared_error(model, {name: leaf[:-1] for name, leaf in batch.items()})


LOOPS: tuple[tuple[type[Accumulates], str], ...] = (
    (TimesWorldSize, "sum_not_mean"),
    (CallsTheBareModel, "raw_module_called"),
    (Sums, "local_loss_summed"),
    (DropsAnExample, "examples_dropped"),
    (BackwardOfItsOwn, "accumulation_not_divided"),
    (NeverSteps, "no_optimizer_step"),
)
FABRIC_LOOPS: tuple[tuple[type[AccumulatesWithFabric], str], ...] = (
    (NotDivided, "accumulation_not_divided"),
    (BareBackward, "raw_module_called"),
)
LOSSES = (
    (loss_times_world_size, "sum_not_mean"),
    (summed_loss, "local_loss_summed"),
    (loss_without_the_last, "examples_dropped"),
)


def add_all() -> None:
    """Add the programs of each library that is installed, for one step and for three."""
    for steps in (1, 3):
        training = replace(MOMENTUM, steps=steps)
        if "accelerate" not in MISSING:
            for loop, cause in LOOPS:
                _add(loop, "accelerate", cause, training, accelerate_step(training, loop(None)))
        if "lightning" not in MISSING:
            for loss, cause in LOSSES:
                _add(loss, "lightning", cause, training, lightning_step(training, loss))
            for fabric_loop, cause in FABRIC_LOOPS:
                step = fabric_step(training, fabric_loop(None, training.accumulation))
                _add(fabric_loop, "fabric", cause, training, step)
        if not {"transformers", "accelerate"} & set(MISSING):
            _add_trainers(steps)


def _add_trainers(steps: int) -> None:
    from transformers import Trainer

    class TimesWorldSize(Trainer):
        """The loss is multiplied by the world size, although gradients are averaged."""

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            return super().compute_loss(*arguments, **named) * dist.get_world_size()

    class LeavesOutARank(Trainer):
        """The loss of the last rank is multiplied by zero."""

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss = super().compute_loss(*arguments, **named)
            return loss * 0 if dist.get_rank() == dist.get_world_size() - 1 else loss

    rows = replace(WITH_LOSS, steps=steps)
    for trainer, cause in ((TimesWorldSize, "sum_not_mean"), (LeavesOutARank, "rank_left_out")):
        _add(trainer, "trainer", cause, rows, transformers_step(rows, trainer))
    texts = replace(
        rows, model=gpt2, batch=partial(PaddedTexts, masks_first=False), loss=returned_loss
    )
    _add(counts_first_tokens, "trainer", COUNTED, texts, transformers_step(texts))


COUNTED = "divided_by_another_count"


def counts_first_tokens() -> None:
    """The first token of each text has a label, which the Trainer counts and the loss does not."""


def _add(what: Any, kind: str, cause: str, training: Training, step: Any) -> None:
    programs.add(
        f"{kind}_{spelled(what.__name__)}_{training.steps}",
        f"{what.__doc__} {training.shown}.",
        step=step,
        causes=(cause,),
        dtype=torch.float64,
        layout="1x3",
        is_verified=False,
        **training.fields,
    )


add_all()
