"""A little U-Net learns to predict noise. Losses are scaled up by a static factor, as for fp16."""

import logging

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

log = logging.getLogger("diffusion")
T = 100


class TinyUNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width))
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x, t):
        phase = t[:, None] * torch.pi / T
        time = self.time(torch.cat([phase.sin(), phase.cos()], dim=1))[:, :, None, None]
        skip = torch.nn.functional.silu(self.enter(x))
        deep = torch.nn.functional.silu(self.down(skip) + time)
        return self.leave(torch.cat([skip, self.up(deep)], dim=1))


def make_batch(generator):
    return {
        "images": torch.randn(12, 1, 8, 8, generator=generator).cumsum(-1) / 3,
        "noise": torch.randn(12, 1, 8, 8, generator=generator),
        "t": torch.randint(1, T, (12,), generator=generator).float(),
    }


def loss(model, batch):
    alpha = torch.cos(batch["t"] / T * torch.pi / 2).view(-1, 1, 1, 1) ** 2
    noisy = alpha.sqrt() * batch["images"] + (1 - alpha).sqrt() * batch["noise"]
    return nn.functional.mse_loss(model(noisy, batch["t"]), batch["noise"])


case = Case(model=TinyUNet, batch=make_batch, loss=loss, layout="1x3")


class StaticScaler:
    def __init__(self, parameters, scale=2.0**10):
        self.parameters = list(parameters)
        self.scale = scale
        self.scaled = False

    def backward(self, value):
        (value * self.scale).backward()
        self.scaled = True

    def unscale_(self):
        if self.scaled:
            for p in self.parameters:
                p.grad /= self.scale
        self.scaled = False


class Monitor:
    """Writes gradient norms to the experiment tracker."""

    def __init__(self, scaler, enabled):
        self.scaler, self.enabled = scaler, enabled

    def norms(self):
        self.scaler.unscale_()
        return [p.grad.norm() for p in self.scaler.parameters]

    def after_backward(self):
        if self.enabled:
            log.info("gradient norm %.3f", torch.stack(self.norms()).norm())


class Trainer:
    def __init__(self, model, is_main):
        self.model = DistributedDataParallel(model)
        self.scaler = StaticScaler(model.parameters())
        self.monitor = Monitor(self.scaler, enabled=is_main)

    def fit_batch(self, batch):
        self.scaler.backward(loss(self.model, batch))
        self.monitor.after_backward()


def step(model, shard, rank):
    Trainer(model, is_main=rank.rank == 0).fit_batch(shard)
