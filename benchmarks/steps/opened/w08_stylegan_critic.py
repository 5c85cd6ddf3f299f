"""The discriminator phase of a StyleGAN-like trainer, with the minibatch-deviation layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CHANNELS, SIZE, IMAGES = 3, 6, 16


class MinibatchStd(nn.Module):
    """Appends a map with the mean standard deviation over a group of images."""

    def __init__(self, group_size: int = 4) -> None:
        super().__init__()
        self.group_size = group_size

    def forward(self, x):
        n, c, h, w = x.shape
        group = min(self.group_size, n)
        y = x.reshape(group, -1, c, h, w)
        y = y - y.mean(dim=0)
        y = (y.square().mean(dim=0) + 1e-8).sqrt()
        y = y.mean(dim=[1, 2, 3]).reshape(-1, 1, 1, 1)
        y = y.repeat(group, 1, h, w)
        return torch.cat([x, y], dim=1)


class Discriminator(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.from_rgb = nn.Conv2d(CHANNELS, width, 1)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.minibatch_std = MinibatchStd()
        self.epilogue = nn.Conv2d(width + 1, width, 3, padding=1)
        self.score = nn.Linear(width, 1)

    def forward(self, images):
        x = F.leaky_relu(self.from_rgb(images), 0.2)
        x = F.leaky_relu(F.avg_pool2d(self.conv(x), 2), 0.2)
        x = F.leaky_relu(self.epilogue(self.minibatch_std(x)), 0.2)
        return self.score(x.mean(dim=[2, 3])).squeeze(1)


def logistic_loss(real_scores, fake_scores):
    return F.softplus(-real_scores).mean() + F.softplus(fake_scores).mean()


def make_batch(generator):
    shape = (IMAGES, CHANNELS, SIZE, SIZE)
    contrast = torch.rand(IMAGES, 1, 1, 1, generator=generator) * 3
    return {
        "real": torch.randn(shape, generator=generator) * contrast,
        "fake": torch.randn(shape, generator=generator) * contrast.flip(0) - 0.3,
    }


def discriminator_loss(model, batch):
    return logistic_loss(model(batch["real"]), model(batch["fake"]))


case = Case(model=Discriminator, batch=make_batch, loss=discriminator_loss, layout="1x2")


class DiscriminatorPhase:
    """One `Dmain` phase: real and fake images go through the network separately."""

    name = "Dmain"

    def __init__(self, discriminator: nn.Module) -> None:
        self.discriminator = DistributedDataParallel(discriminator, broadcast_buffers=False)

    def run(self, batch) -> dict[str, float]:
        real_scores = self.discriminator(batch["real"])
        fake_scores = self.discriminator(batch["fake"])
        logistic_loss(real_scores, fake_scores).backward()
        return {
            "Scores/real": real_scores.detach().mean().item(),
            "Scores/fake": fake_scores.detach().mean().item(),
        }


def step(model, shard, rank):
    DiscriminatorPhase(model).run(shard)
