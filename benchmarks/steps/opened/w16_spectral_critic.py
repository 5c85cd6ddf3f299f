"""A critic with spectral normalisation; the main process logs its scores now and then."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm

from ddp_equivalence import Case

FEATURES, WIDTH, EXAMPLES = 9, 14, 16


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            spectral_norm(nn.Linear(FEATURES, WIDTH)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(WIDTH, WIDTH)),
            nn.LeakyReLU(0.2),
        )
        self.score = spectral_norm(nn.Linear(WIDTH, 1))

    def forward(self, x):
        return self.score(self.body(x)).squeeze(1)


def hinge_loss(scores):
    real, fake = scores.chunk(2)
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def real_and_fake(batch):
    return torch.cat([batch["real"], batch["fake"]])


def make_batch(generator):
    return {
        "real": torch.randn(EXAMPLES, FEATURES, generator=generator) + 0.4,
        "fake": torch.randn(EXAMPLES, FEATURES, generator=generator) * 0.7,
    }


def critic_loss(model, batch):
    return hinge_loss(model(real_and_fake(batch)))


case = Case(model=Critic, batch=make_batch, loss=critic_loss, layout="2x2")


class ScoreLogger:
    """Keeps histograms of the scores for the dashboard, on the main process."""

    def __init__(self, critic: nn.Module, every: int = 100) -> None:
        self.critic = critic
        self.every = every
        self.enabled = dist.get_rank() == 0
        self.histograms: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def score(self, x):
        return self.critic(x)

    def maybe_log(self, iteration: int, batch) -> None:
        if not self.enabled or iteration % self.every:
            return
        for name in ("real", "fake"):
            scores = self.score(batch[name])
            self.histograms[f"scores/{name}"] = torch.histc(scores, bins=8, min=-2, max=2)


class CriticTrainer:
    def __init__(self, critic: nn.Module) -> None:
        self.critic = critic
        self.ddp = DistributedDataParallel(critic, broadcast_buffers=False)
        self.logger = ScoreLogger(critic)
        self.iteration = 0

    def train_step(self, batch) -> float:
        self.logger.maybe_log(self.iteration, batch)
        loss = hinge_loss(self.ddp(real_and_fake(batch)))
        loss.backward()
        self.iteration += 1
        return loss.item()


def step(model, shard, rank):
    CriticTrainer(model).train_step(shard)
