"""Mixture of experts whose routers keep a z-loss, trained with a constant loss scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

WIDTH, EXPERTS, CLASSES = 8, 3, 5


class SoftMoE(nn.Module):
    def __init__(self, z_coefficient: float = 0.02) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.z_coefficient = z_coefficient
        self.z_loss: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.router(hidden)
        self.z_loss = self.z_coefficient * logits.logsumexp(dim=-1).square().mean()
        outputs = torch.stack([expert(hidden) for expert in self.experts], dim=-1)
        return (outputs * logits.softmax(dim=-1).unsqueeze(1)).sum(dim=-1)


class MoEClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(SoftMoE() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.stem(features)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)

    def pop_router_loss(self) -> Tensor:
        """The z-loss of all layers in the last forward pass, which they forget."""
        losses = [layer.z_loss for layer in self.layers]
        for layer in self.layers:
            layer.z_loss = None
        return torch.stack(losses).sum()


def task_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["features"]), batch["labels"])


def loss(model: MoEClassifier, batch: dict[str, Tensor]) -> Tensor:
    main = task_loss(model, batch)
    return main + model.pop_router_loss()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "features": torch.randn(16, 6, generator=generator),
        "labels": torch.randint(CLASSES, (16,), generator=generator),
    }


@dataclass(frozen=True)
class Precision:
    loss_scale: float = 1024.0
    micro_batches: int = 2

    def scale(self, value: Tensor) -> Tensor:
        return value * self.loss_scale

    def unscale_(self, gradient: Tensor) -> None:
        gradient.div_(self.loss_scale)


class MixedPrecisionTrainer:
    def __init__(self, model: MoEClassifier, world_size: int, precision: Precision) -> None:
        self.model = model
        self.world_size = world_size
        self.precision = precision

    def backward(self, micro_batch: dict[str, Tensor]) -> None:
        objective = self.precision.scale(task_loss(self.model, micro_batch))
        objective = objective + self.model.pop_router_loss()
        (objective / self.precision.micro_batches).backward()

    def average_gradients(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self.world_size)
            self.precision.unscale_(parameter.grad)

    def accumulate(self, batch: dict[str, Tensor]) -> None:
        parts = [value.chunk(self.precision.micro_batches) for value in batch.values()]
        for features, labels in zip(*parts, strict=True):
            self.backward({"features": features, "labels": labels})
        self.average_gradients()


case = Case(model=MoEClassifier, batch=make_batch, loss=loss, layout="2x2")


def step(model: MoEClassifier, shard: dict[str, Tensor], rank) -> None:
    MixedPrecisionTrainer(model, rank.world_size, Precision()).accumulate(shard)
