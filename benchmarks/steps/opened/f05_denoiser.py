"""Noise-prediction training of a small diffusion model with reproducible noise and timesteps."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

TIMESTEPS = 50
LATENT = 6
NOISE_SEED = 1234


class CosineSchedule:
    def __init__(self, steps=TIMESTEPS, offset=0.008):
        grid = torch.arange(1, steps + 1, dtype=torch.float64) / steps
        angle = (grid + offset) / (1 + offset) * math.pi / 2
        self.alpha_bar = angle.cos().square().clamp(min=1e-3)

    def add_noise(self, clean, noise, t):
        keep = self.alpha_bar[t].unsqueeze(-1)
        return keep.sqrt() * clean + (1 - keep).sqrt() * noise


class NoiseSource:
    """The noise of a training step is a function of seed and step, so that runs can be resumed."""

    def __init__(self, seed=NOISE_SEED, rank=0, world_size=1):
        self.seed = seed
        self.rank = rank
        self.world_size = world_size

    def draw(self, step, rows):
        generator = torch.Generator().manual_seed(self.seed + step)
        total = rows * self.world_size
        noise = torch.randn(total, LATENT, generator=generator, dtype=torch.float64)
        t = torch.randint(TIMESTEPS, (total,), generator=generator)
        return noise[:rows], t[:rows]


class Denoiser(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.time_embedding = nn.Embedding(TIMESTEPS, 4)
        self.layers = nn.Sequential(
            nn.Linear(LATENT + 4, width), nn.SiLU(), nn.Linear(width, LATENT)
        )

    def forward(self, noisy, t):
        return self.layers(torch.cat([noisy, self.time_embedding(t)], dim=-1))


schedule = CosineSchedule()


def denoising_loss(model, latents, source, step=0):
    noise, t = source.draw(step, len(latents))
    predicted = model(schedule.add_noise(latents, noise, t), t)
    return F.mse_loss(predicted, noise)


def make_batch(generator):
    return {"latents": torch.randn(12, LATENT, generator=generator)}


def big_batch_loss(model, batch):
    return denoising_loss(model, batch["latents"], NoiseSource())


class DiffusionTrainer:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(model)
        self.source = NoiseSource(rank=dist.get_rank(), world_size=dist.get_world_size())
        self.global_step = 0

    def train_step(self, latents):
        loss = denoising_loss(self.ddp, latents, self.source, self.global_step)
        loss.backward()
        self.global_step += 1
        return loss.item()


case = Case(model=Denoiser, batch=make_batch, loss=big_batch_loss, layout="1x3")


def step(model, shard, rank):
    DiffusionTrainer(model).train_step(shard["latents"])
