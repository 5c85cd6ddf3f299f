"""Gradient accumulation on a fully sharded model, with no communication in between."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass
class TrainConfig:
    gradient_accumulation_steps: int = 4
    reshard_after_forward: bool = True
    widths: list[int] = field(default_factory=lambda: [9, 17, 17, 3])


CONFIG = TrainConfig()


class Perceptron(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(size_in, size_out) for size_in, size_out in zip(widths, widths[1:])
        )

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = F.elu(layer(x))
        return last(x)


def build_model() -> nn.Module:
    return Perceptron(CONFIG.widths)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["inputs"]), batch["outputs"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    inputs = torch.randn(32, CONFIG.widths[0], generator=generator)
    return {"inputs": inputs, "outputs": inputs[:, :3] * inputs[:, 3:6]}


def micro_batches(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    size = len(batch["inputs"]) // count
    return [
        {name: tensor[start : start + size] for name, tensor in batch.items()}
        for start in range(0, size * count, size)
    ]


def train_one_step(model: nn.Module, batch: dict[str, Tensor], config: TrainConfig) -> None:
    accumulate = config.gradient_accumulation_steps
    for index, micro in enumerate(micro_batches(batch, accumulate)):
        # Reduce only at the end of an accumulation.
        at_boundary = index % accumulate == 0
        model.set_requires_gradient_sync(at_boundary)
        (loss(model, micro) / accumulate).backward()


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=CONFIG.reshard_after_forward)
    fully_shard(model, reshard_after_forward=CONFIG.reshard_after_forward)
    train_one_step(model, shard, CONFIG)


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")
