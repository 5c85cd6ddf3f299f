"""Denoising diffusion with min-SNR weights. Each rank takes its rows out of one table of draws."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

LEVELS, ROWS, POINTS = 20, 16, 6


class Schedule:
    def __init__(self, gamma=5.0):
        self.kept = torch.cos(torch.linspace(0.05, 1.5, LEVELS)).square().double()
        snr = self.kept / (1 - self.kept)
        self.weight = snr.clamp(max=gamma) / snr

    def blur(self, clean, noise, level):
        kept = self.kept[level].unsqueeze(-1)
        return kept.sqrt() * clean + (1 - kept).sqrt() * noise


@dataclass
class Draws:
    """What is random about a step."""

    clean: Tensor
    noise: Tensor
    level: Tensor

    def of_rank(self, rank) -> "Draws":
        count = len(self.clean) // rank.world_size
        mine = slice(rank.rank * count, (rank.rank + 1) * count)
        return Draws(clean=self.clean[mine], noise=self.noise[mine], level=self.level[:count])


class Denoiser(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.level = nn.Embedding(LEVELS, width)
        self.enter = nn.Linear(POINTS, width)
        self.leave = nn.Linear(width, POINTS)

    def forward(self, blurred, level):
        return self.leave(nn.functional.silu(self.enter(blurred) + self.level(level)))


schedule = Schedule()


def weighted_error(model, draws: Draws):
    blurred = schedule.blur(draws.clean, draws.noise, draws.level)
    error = (model(blurred, draws.level) - draws.noise).square().mean(-1)
    return (schedule.weight[draws.level] * error).mean()


def curves_and_draws(generator):
    return (
        torch.randn(ROWS, POINTS, generator=generator).cumsum(-1),
        torch.randn(ROWS, POINTS, generator=generator),
        torch.randint(0, LEVELS, (ROWS,), generator=generator),
    )


def loss(model, batch):
    return weighted_error(model, Draws(*batch))


case = Case(model=Denoiser, batch=curves_and_draws, loss=loss, layout="1x2", shards="own")


def step(model, batch, rank):
    ddp = DistributedDataParallel(model)
    weighted_error(ddp, Draws(*batch).of_rank(rank)).backward()
