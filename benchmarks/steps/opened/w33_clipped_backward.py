"""A recurrent sequence labeller: gradients are clipped, since they explode now and then."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from ddp_equivalence import Case

FEATURES, WIDTH, LABELS, LENGTH, EXAMPLES = 5, 8, 4, 7, 15


@dataclass(frozen=True)
class OptimizationConfig:
    max_grad_norm: float = 0.05
    error_if_nonfinite: bool = True


class Labeller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(FEATURES, WIDTH, batch_first=True)
        self.classifier = nn.Linear(WIDTH, LABELS)

    def forward(self, frames: Tensor) -> Tensor:
        states, _ = self.encoder(frames)
        return self.classifier(states)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["frames"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "frames": torch.randn(EXAMPLES, LENGTH, FEATURES, generator=generator),
        "labels": torch.randint(LABELS, (EXAMPLES, LENGTH), generator=generator),
    }


class GradientPipeline:
    """What happens to gradients between the backward pass and the optimizer."""

    def __init__(self, parameters, config: OptimizationConfig) -> None:
        self.parameters = list(parameters)
        self.config = config
        self.last_norm: float | None = None

    def clip(self) -> None:
        norm = clip_grad_norm_(
            self.parameters,
            self.config.max_grad_norm,
            error_if_nonfinite=self.config.error_if_nonfinite,
        )
        self.last_norm = norm.item()

    def average(self) -> None:
        world = dist.get_world_size()
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        dist.all_reduce(flat)
        flat /= world
        sizes = [p.numel() for p in self.parameters]
        for parameter, piece in zip(self.parameters, flat.split(sizes)):
            parameter.grad.copy_(piece.view_as(parameter))

    def __call__(self) -> None:
        self.clip()
        self.average()


class Trainer:
    def __init__(self, model: nn.Module, config: OptimizationConfig) -> None:
        self.model = model
        self.process_gradients = GradientPipeline(model.parameters(), config)

    def train_batch(self, batch: dict[str, Tensor]) -> Tensor:
        self.model.zero_grad()
        value = loss(self.model, batch)
        value.backward()
        self.process_gradients()
        return value.detach()


case = Case(model=Labeller, batch=make_batch, loss=loss, layout="1x3")


def step(model, shard, rank):
    Trainer(model, OptimizationConfig()).train_batch(shard)
