"""Half-precision training with a loss scale that is fitted to every batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

LARGEST_HALF = 65504.0


class FittedLossScaler:
    """The largest power of two with which the loss still fits into half precision."""

    def __init__(self, initial_scale: float = 2.0**16, headroom: float = 4.0) -> None:
        self.initial_scale = initial_scale
        self.headroom = headroom
        self.scale_factor = initial_scale

    def fit(self, value: float) -> None:
        factor = self.initial_scale
        while value * factor * self.headroom > LARGEST_HALF:
            factor /= 2.0
        self.scale_factor = factor

    def scale(self, value: Tensor) -> Tensor:
        self.fit(value.item())
        return value * self.scale_factor

    def unscale_(self, parameters: list[nn.Parameter]) -> None:
        inverse = 1.0 / self.scale_factor
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse)


class DataParallelGroup:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def average_(self, parameters: list[nn.Parameter]) -> None:
        handles = []
        for parameter in parameters:
            parameter.grad.div_(self.world_size)
            handles.append(dist.all_reduce(parameter.grad, async_op=True))
        for handle in handles:
            handle.wait()


class HalfPrecisionTrainer:
    def __init__(self, model: nn.Module, group: DataParallelGroup) -> None:
        self.model = model
        self.group = group
        self.scaler = FittedLossScaler()
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def forward_backward(self, batch: dict[str, Tensor]) -> float:
        for parameter in self.parameters:
            parameter.grad = None
        value = duration_loss(self.model, batch)
        self.scaler.scale(value).backward()
        self.group.average_(self.parameters)
        self.scaler.unscale_(self.parameters)
        return value.item()


class DurationModel(nn.Module):
    """Predicts for how many frames each phoneme lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.phonemes = nn.Embedding(11, 8)
        self.context = nn.Conv1d(8, 8, kernel_size=3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.frames = nn.Linear(8, 1)

    def forward(self, phonemes: Tensor) -> Tensor:
        hidden = self.phonemes(phonemes)
        hidden = hidden + F.relu(self.context(hidden.transpose(1, 2))).transpose(1, 2)
        return self.frames(self.norm(hidden)).squeeze(-1)


def duration_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["phonemes"]), batch["durations"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Utterances sorted by speaking rate, the fast speakers first."""
    rates = torch.linspace(1.0, 6.0, 12).unsqueeze(1)
    return {
        "phonemes": torch.randint(11, (12, 6), generator=generator),
        "durations": rates * torch.rand(12, 6, generator=generator),
    }


case = Case(model=DurationModel, batch=make_batch, loss=duration_loss, layout="1x2")


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    trainer = HalfPrecisionTrainer(model, DataParallelGroup(rank.world_size))
    trainer.forward_backward(shard)
