"""Denoising diffusion; the noise of every sample has a seed, so that runs can be repeated."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

SAMPLES, CHANNELS, LENGTH = 16, 2, 10


@dataclass
class CosineSchedule:
    """How much of the signal is left at every timestep."""

    timesteps: int = 50
    alphas: Tensor = field(init=False)

    def __post_init__(self) -> None:
        time = (torch.arange(self.timesteps, dtype=torch.float64) + 0.5) / self.timesteps
        self.alphas = torch.cos(time * torch.pi / 2) ** 2

    def add_noise(self, clean: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        alpha = self.alphas[timesteps].view(-1, 1, 1)
        return alpha.sqrt() * clean + (1 - alpha).sqrt() * noise


class Denoiser(nn.Module):
    def __init__(self, width: int = 12, timesteps: int = 50) -> None:
        super().__init__()
        self.time = nn.Embedding(timesteps, width)
        self.enter = nn.Conv1d(CHANNELS, width, 3, padding=1)
        self.leave = nn.Conv1d(width, CHANNELS, 3, padding=1)

    def forward(self, noisy: Tensor, timesteps: Tensor) -> Tensor:
        hidden = self.enter(noisy) + self.time(timesteps).unsqueeze(-1)
        return self.leave(F.silu(hidden))


class NoiseSource:
    """Draws timestep and noise of sample number n of the global batch with the seed base + n."""

    def __init__(self, schedule: CosineSchedule, base_seed: int = 1234) -> None:
        self.schedule = schedule
        self.base_seed = base_seed

    def __call__(self, clean: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        noise, timesteps = [], []
        for number in range(first, first + len(clean)):
            generator = torch.Generator().manual_seed(self.base_seed + number)
            timesteps.append(torch.randint(self.schedule.timesteps, (), generator=generator))
            noise.append(torch.randn(clean.shape[1:], generator=generator, dtype=clean.dtype))
        return torch.stack(noise), torch.stack(timesteps)


def denoising_loss(
    model: nn.Module, schedule: CosineSchedule, clean: Tensor, noise: Tensor, timesteps: Tensor
) -> Tensor:
    noisy = schedule.add_noise(clean, noise, timesteps)
    return F.mse_loss(model(noisy, timesteps), noise)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    schedule = CosineSchedule()
    noise, timesteps = NoiseSource(schedule)(batch["signal"])
    return denoising_loss(model, schedule, batch["signal"], noise, timesteps)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {"signal": torch.randn(SAMPLES, CHANNELS, LENGTH, generator=generator)}


case = Case(model=Denoiser, batch=make_batch, loss=loss, layout="1x4")


class DiffusionTrainer:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.rank = rank
        self.schedule = CosineSchedule()
        self.noise = NoiseSource(self.schedule)
        self.model = DistributedDataParallel(model)

    def train_step(self, batch: dict[str, Tensor]) -> float:
        clean = batch["signal"]
        noise, timesteps = self.noise(clean)
        objective = denoising_loss(self.model, self.schedule, clean, noise, timesteps)
        objective.backward()
        return objective.item()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    DiffusionTrainer(model, rank).train_step(shard)
