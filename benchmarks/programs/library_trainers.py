"""Programs that train with the trainers of libraries, where these are installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.programs.common import PADDING, Batch, mlp
from benchmarks.programs.training_loop import Examples
from benchmarks.programs.wrappers import Make

LIBRARIES = ("accelerate", "lightning", "transformers")

MISSING = tuple(name for name in LIBRARIES if find_spec(name) is None)
"""The libraries that are not installed, so that their programs are left out."""

TOKENS, LENGTH = 32, 8


class WithLoss(nn.Module):
    """A model that returns its loss, as Hugging Face's Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, rows: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.layers(rows), targets)}


def gpt2() -> nn.Module:
    """A GPT-2 of transformers with one small layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0))


def returned_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model returns."""
    loss: Tensor = model(**batch)["loss"]
    return loss


@dataclass(frozen=True)
class PaddedTexts:
    """Builds texts for a language model. The later a text, the fewer of its tokens count.

    The first token of a text has no prediction. Hugging Face's Trainer counts it if its label is
    not masked, and the loss of the model does not.
    """

    count: int
    masks_first: bool = True

    def __call__(self, generator: torch.Generator) -> Batch:
        tokens = torch.randint(0, TOKENS, (self.count, LENGTH), generator=generator)
        lengths = LENGTH - torch.arange(self.count) % 12 // 3
        padded = torch.arange(LENGTH) >= lengths[:, None]
        padded[:, 0] |= self.masks_first
        return {"input_ids": tokens, "labels": tokens.masked_fill(padded, PADDING)}


@dataclass(frozen=True)
class Training:
    """What a trainer of a library trains with, and the fields of a program that say the same."""

    optimizer: Make
    steps: int = 1
    accumulation: int = 1
    norm: float | None = None
    model: Callable[[], nn.Module] = mlp
    batch: Callable[[int], Callable[[torch.Generator], Batch]] = Examples
    loss: Callable[[nn.Module, Any], Tensor] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a program."""
        fields: dict[str, Any] = {"compare": "update", "steps": self.steps, "shards": "own"}
        fields |= {"model": self.model, "batch": self.batch(24 * self.steps)}
        fields["optimizer"] = self.optimizer
        if self.loss:
            fields["loss"] = self.loss
        if self.norm:
            fields["clip"] = self.norm
        return fields

    @property
    def shown(self) -> str:
        clip = f"clipped to {self.norm}" if self.norm else "no clipping"
        return f"{clip}; {self.accumulation} micro-batches of each rank; {self.steps} steps"


def transformers_step(training: Training, trainer: Any = None) -> Any:
    """A step of Hugging Face's Trainer, or of a subclass."""
    from transformers import Trainer

    from ddp_equivalence.adapters.transformers import trainer_step

    return trainer_step(
        trainer or Trainer,
        steps=training.steps,
        optimizer=training.optimizer,
        gradient_accumulation_steps=training.accumulation,
        max_grad_norm=training.norm or 0.0,
    )


def accelerate_step(training: Training, loop: Any) -> Any:
    """A step with a loop of Accelerate."""
    from ddp_equivalence.adapters.accelerate import accelerate_step as step_with

    return step_with(
        loop,
        steps=training.steps,
        optimizer=training.optimizer,
        gradient_accumulation_steps=training.accumulation,
    )


def lightning_step(training: Training, loss: Any) -> Any:
    """A step of Lightning's Trainer."""
    from ddp_equivalence.adapters.lightning import lightning_step as step_with

    return step_with(
        loss,
        steps=training.steps,
        optimizer=training.optimizer,
        accumulate_grad_batches=training.accumulation,
        gradient_clip_val=training.norm,
    )


def fabric_step(training: Training, loop: Any) -> Any:
    """A step with a loop of Lightning Fabric. The loop divides by the micro-batches itself."""
    from ddp_equivalence.adapters.lightning import fabric_step as step_with

    return step_with(
        loop,
        steps=training.steps * training.accumulation,
        optimizer=training.optimizer,
    )
