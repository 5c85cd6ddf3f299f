"""Logit distillation with a dynamic loss scale that keeps the scaled loss within half precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

FEATURES, CLASSES, EXAMPLES = 6, 4, 16
HALF_MAX = 65504.0

Batch = dict[str, Tensor]


@dataclass
class PrecisionConfig:
    initial_scale: float = 2.0**16
    backoff: float = 0.5
    minimum: float = 1.0


def build_student() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def make_batch(generator: torch.Generator) -> Batch:
    """Cached logits of the teacher, which is surer of the later examples (a curriculum)."""
    sharpness = torch.linspace(0.3, 4.0, EXAMPLES).unsqueeze(1)
    return {
        "rows": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "teacher_logits": sharpness * torch.randn(EXAMPLES, CLASSES, generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["teacher_logits"])


class DynamicLossScaler:
    """Powers of two, so that scaling is exact."""

    def __init__(self, config: PrecisionConfig) -> None:
        self.config = config
        self.scale = config.initial_scale

    def overflows(self, scaled: Tensor) -> bool:
        return bool(scaled.detach().abs() > HALF_MAX)

    def scale_loss(self, value: Tensor) -> Tensor:
        while self.scale > self.config.minimum and self.overflows(value * self.scale):
            self.scale *= self.config.backoff
        return value * self.scale

    def unscale_(self, gradients: list[Tensor]) -> None:
        torch._foreach_div_(gradients, self.scale)


class GradientBuffer:
    """All gradients in one tensor, reduced with one call while they are scaled."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        size = sum(param.numel() for param in self.params)
        self.flat = torch.zeros(size, dtype=self.params[0].dtype)
        start = 0
        for param in self.params:
            param.grad = self.flat[start : start + param.numel()].view_as(param)
            start += param.numel()

    def average(self) -> None:
        dist.all_reduce(self.flat)
        self.flat.div_(dist.get_world_size())

    def gradients(self) -> list[Tensor]:
        return [param.grad for param in self.params]


class DistillationTrainer:
    def __init__(self, student: nn.Module, config: PrecisionConfig) -> None:
        self.student = student
        self.buffer = GradientBuffer(student)
        self.scaler = DynamicLossScaler(config)

    def backward(self, batch: Batch) -> Tensor:
        value = loss(self.student, batch)
        self.scaler.scale_loss(value).backward()
        return value.detach()

    def training_step(self, batch: Batch) -> Tensor:
        value = self.backward(batch)
        self.buffer.average()
        self.scaler.unscale_(self.buffer.gradients())
        return value


case = Case(model=build_student, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank) -> None:
    DistillationTrainer(model, PrecisionConfig()).training_step(shard)
