"""Lightning's Trainer with a LightningModule of one's own, two micro-batches a step.

ddp-equivalence check examples/trainer_of_lightning.py
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from ddp_equivalence import Case
from ddp_equivalence.adapters.lightning import lightning_step

STEPS, LEARNING_RATE = 2, 0.1


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch["rows"]), batch["targets"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=0.9)


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    """Sixteen rows, which are two big batches of eight."""
    return {
        "rows": torch.randn(8 * STEPS, 7, generator=generator),
        "targets": torch.randn(8 * STEPS, 5, generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model.training_step(batch, 0)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return model.configure_optimizers()


case = Case(model=Regression, batch=rows, loss=loss, layout="1x2", shards="own")
step = lightning_step(steps=STEPS, accumulate_grad_batches=2)
options = {"compare": "update", "steps": STEPS, "optimizer": make_optimizer}
