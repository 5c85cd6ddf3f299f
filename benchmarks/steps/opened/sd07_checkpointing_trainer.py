"""Acoustic model with activation checkpointing that is switched on by the trainer."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case


@dataclass
class AcousticConfig:
    num_mel_bins: int = 10
    hidden_size: int = 10
    num_layers: int = 3
    num_phones: int = 6


@dataclass
class TrainingArguments:
    gradient_checkpointing: bool = True
    gradient_checkpointing_kwargs: dict[str, Any] = field(
        default_factory=lambda: {"use_reentrant": True}
    )


class Layer(nn.Module):
    def __init__(self, in_size, size):
        super().__init__()
        self.inner = nn.Linear(in_size, 2 * size)
        self.outer = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, frames):
        return self.norm(self.outer(F.glu(self.inner(frames))))


class AcousticModel(nn.Module):
    def __init__(self):
        super().__init__()
        cfg = AcousticConfig()
        sizes = [cfg.num_mel_bins] + [cfg.hidden_size] * cfg.num_layers
        self.layers = nn.ModuleList(Layer(a, b) for a, b in zip(sizes, sizes[1:]))
        self.head = nn.Linear(cfg.hidden_size, cfg.num_phones)
        self._checkpoint_func = None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs):
        def run(function, *inputs):
            return checkpoint(function, *inputs, **gradient_checkpointing_kwargs)

        self._checkpoint_func = run

    def forward(self, frames):
        hidden = frames
        for layer in self.layers:
            if self._checkpoint_func is not None:
                hidden = self._checkpoint_func(layer, hidden)
            else:
                hidden = layer(hidden)
        return self.head(hidden)


def frame_loss(model, batch):
    logits = model(batch["frames"])
    return F.cross_entropy(logits.flatten(0, 1), batch["phones"].flatten())


class Trainer:
    def __init__(self, model, args: TrainingArguments):
        self.args = args
        self.model = self._wrap_model(model)

    def _wrap_model(self, model):
        if self.args.gradient_checkpointing:
            model.gradient_checkpointing_enable(self.args.gradient_checkpointing_kwargs)
        for layer in model.layers:
            fully_shard(layer)
        return fully_shard(model)

    def training_step(self, inputs):
        self.model.train()
        value = frame_loss(self.model, inputs)
        value.backward()
        return value.detach()


def make_batch(generator):
    return {
        "frames": torch.randn(8, 9, 10, generator=generator),
        "phones": torch.randint(0, 6, (8, 9), generator=generator),
    }


loss = frame_loss


def step(model, shard, rank):
    Trainer(model, TrainingArguments()).training_step(shard)


case = Case(model=AcousticModel, batch=make_batch, loss=loss, layout="1x2")
