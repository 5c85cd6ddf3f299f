"""Right programs that train with the trainers of libraries."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

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
from benchmarks.programs.optimizers import OPTIMIZERS
from benchmarks.programs.program import Programs
from ddp_equivalence.diagnosis.unknown import UnknownBecause

programs = Programs("trainers", right=True)

CHOSEN = ("momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad")

SENTENCES = {
    "trainer": "Hugging Face's Trainer.",
    "gpt2": "Hugging Face's Trainer with a GPT-2.",
    "accelerate": "A loop with Accelerate.",
    "lightning": "Lightning's Trainer.",
    "fabric": "A loop with Lightning Fabric.",
}


@dataclass(frozen=True)
class Accumulates:
    """The loop of Accelerate's documentation."""

    norm: float | None

    def __call__(self, accelerator: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(self.loss(model, batch))
                if self.norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), self.norm)
                optimizer.step()
                optimizer.zero_grad()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return mean_squared_error(model, batch)


@dataclass(frozen=True)
class AccumulatesWithFabric:
    """The loop of Fabric's documentation, with so many micro-batches a step."""

    norm: float | None
    micro_batches: int

    def __call__(self, fabric: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
        for number, batch in enumerate(loader, 1):
            accumulates = number % self.micro_batches != 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                fabric.backward(self.loss(model, batch))
            if not accumulates:
                if self.norm:
                    fabric.clip_gradients(model, optimizer, max_norm=self.norm)
                optimizer.step()
                optimizer.zero_grad()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return mean_squared_error(model, batch) / self.micro_batches


def add_all() -> None:
    """Add the programs of each library that is installed, with every optimizer in two settings."""
    draw = random.Random(0)
    for name in CHOSEN * 2:
        training = Training(
            OPTIMIZERS[name],
            steps=draw.choice((1, 3)),
            accumulation=draw.choice((1, 2)),
            norm=draw.choice((None, 0.2)),
        )
        dtype = draw.choice((torch.float64, torch.float32))
        rows = replace(training, model=WithLoss, loss=returned_loss)
        texts = replace(training, model=gpt2, batch=PaddedTexts, loss=returned_loss)
        if not {"transformers", "accelerate"} & set(MISSING):
            _add("trainer", name, rows, transformers_step(rows), dtype=dtype)
            # A key's bias gets no gradient but rounding, which Adagrad divides by its own size.
            noisy = name == "adagrad" and training.steps > 1
            because = UnknownBecause.LIMIT_ABOVE_SIGNAL if noisy else None
            _add("gpt2", name, texts, transformers_step(texts), dtype=dtype, unknown=because)
        if "accelerate" not in MISSING:
            step = accelerate_step(training, Accumulates(training.norm))
            _add("accelerate", name, training, step, dtype=dtype)
        if "lightning" not in MISSING:
            step = lightning_step(training, mean_squared_error)
            _add("lightning", name, training, step, dtype=dtype)
            loop = AccumulatesWithFabric(training.norm, training.accumulation)
            _add("fabric", name, training, fabric_step(training, loop), dtype=dtype)


def _add(kind: str, optimizer: str, training: Training, step: Any, **fields: Any) -> None:
    name, names = f"{kind}_with_{optimizer}", {one.name for one in programs.all}
    programs.add(
        f"{name}_again" if name in names else name,
        f"{SENTENCES[kind]} {optimizer}; {training.shown}.",
        step=step,
        **fields,
        is_verified=False,
        **training.fields,
    )


add_all()
