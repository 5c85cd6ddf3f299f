"""A regressor with automatic loss scaling, as it is trained in reduced precision."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

SENSORS, TARGETS, EXAMPLES = 8, 2, 18


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(SENSORS, 12),
            nn.SiLU(),
            nn.Linear(12, TARGETS),
        )

    def forward(self, readings: Tensor) -> Tensor:
        return self.layers(readings)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.smooth_l1_loss(model(batch["readings"]), batch["targets"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    severity = torch.linspace(0.2, 4.0, EXAMPLES).unsqueeze(1)
    return {
        "readings": torch.randn(EXAMPLES, SENSORS, generator=generator),
        "targets": severity * torch.randn(EXAMPLES, TARGETS, generator=generator),
    }


class LossScaler:
    """Lifts the loss to just below a target, so that small gradients survive half precision."""

    def __init__(self, target: float = 2.0**12, largest: float = 2.0**20) -> None:
        self.target, self.largest = target, largest
        self.scale = 1.0

    def scale_loss(self, value: Tensor) -> Tensor:
        size = max(value.detach().abs().item(), self.target / self.largest)
        self.scale = 2.0 ** math.floor(math.log2(self.target / size))
        return value * self.scale

    @torch.no_grad()
    def unscale_(self, parameters: list[Tensor]) -> bool:
        finite = True
        for parameter in parameters:
            parameter.grad.div_(self.scale)
            finite = finite and bool(parameter.grad.isfinite().all())
        return finite


@torch.no_grad()
def average_gradients(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


class MixedPrecisionTrainer:
    def __init__(self, model: nn.Module, scaler: LossScaler) -> None:
        self.model, self.scaler = model, scaler
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.skipped = 0

    def backward(self, batch: dict[str, Tensor]) -> None:
        self.model.zero_grad()
        self.scaler.scale_loss(loss(self.model, batch)).backward()
        average_gradients(self.parameters)
        finite = self.scaler.unscale_(self.parameters)
        if not finite:
            self.skipped += 1
            self.model.zero_grad()


case = Case(model=Regressor, batch=make_batch, loss=loss, layout="1x3")


def step(model, shard, rank):
    MixedPrecisionTrainer(model, LossScaler()).backward(shard)
