"""Diffusion on 2-d points with min-SNR weights; small micro-batches, one reduction at the end."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

POINTS, MICRO, TIMES = 14, 2, 50
GAMMA = 5.0

betas = torch.linspace(1e-3, 0.2, TIMES, dtype=torch.float64)
kept = torch.cumprod(1 - betas, dim=0)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMES, 6)
        self.net = nn.Sequential(nn.Linear(2 + 6, 24), nn.SiLU(), nn.Linear(24, 2))

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        return self.net(torch.cat([noisy, self.time(time)], dim=-1))


def points(generator: torch.Generator) -> dict[str, Tensor]:
    angle = 6.28 * torch.rand(POINTS, generator=generator)
    return {
        "clean": torch.stack([angle.cos(), angle.sin()], dim=-1),
        "noise": torch.randn(POINTS, 2, generator=generator),
        "time": torch.randint(TIMES, (POINTS,), generator=generator),
    }


def errors(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The weighted squared error of every example."""
    alpha = kept.to(batch["clean"].device)[batch["time"]]
    noisy = alpha.sqrt()[:, None] * batch["clean"] + (1 - alpha).sqrt()[:, None] * batch["noise"]
    snr = alpha / (1 - alpha)
    weight = snr.clamp(max=GAMMA) / snr
    return weight * (model(noisy, batch["time"]) - batch["noise"]).square().sum(-1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return errors(model, batch).mean()


def micro_batches(batch: dict[str, Tensor]):
    count = len(batch["clean"]) // MICRO
    for k in range(count):
        part = {key: value[k * MICRO : (k + 1) * MICRO] for key, value in batch.items()}
        yield part, k == count - 1


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    examples = len(shard["clean"])
    with contextlib.ExitStack() as unsynchronised:
        unsynchronised.enter_context(ddp.no_sync())
        for part, last in micro_batches(shard):
            if last:
                unsynchronised.close()
            (errors(ddp, part).sum() / examples).backward()


case = Case(model=Denoiser, batch=points, loss=loss)
