"""Trainer with a model of one's own that takes no keyword arguments for its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_equivalence import Case
from ddp_equivalence.adapters.transformers import trainer_step

Batch = dict[str, Tensor]


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(inputs), labels)}


def rows(generator: torch.Generator) -> Batch:
    return {
        "inputs": torch.randn(8, 5, generator=generator),
        "labels": torch.randn(8, 3, generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    value: Tensor = model(**batch)["loss"]
    return value


case = Case(model=Regression, batch=rows, loss=loss, layout="1x2", shards="own")
step = trainer_step(gradient_accumulation_steps=2)
options = {"compare": "update"}
