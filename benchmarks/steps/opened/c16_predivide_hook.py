"""Noise prediction; a communication hook divides half before and half after the sum (for bf16)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

STEPS = 10


class Denoiser(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.time = nn.Embedding(STEPS, 16)
        self.inp = nn.Linear(dim, 16)
        self.out = nn.Sequential(nn.SiLU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, dim))

    def forward(self, x, t):
        return self.out(self.inp(x) + self.time(t))


def samples(generator):
    return {
        "clean": torch.randn(12, 8, generator=generator),
        "noise": torch.randn(12, 8, generator=generator),
        "t": torch.randint(STEPS, (12,), generator=generator),
    }


def min_snr(alpha_bar, gamma=5.0):
    snr = alpha_bar / (1 - alpha_bar)
    return snr.clamp(max=gamma) / snr


def loss(model, batch):
    t = batch["t"]
    alpha_bar = torch.cos((t + 1) / (STEPS + 1) * torch.pi / 2).square().to(batch["clean"])
    signal, sigma = alpha_bar.sqrt()[:, None], (1 - alpha_bar).sqrt()[:, None]
    predicted = model(signal * batch["clean"] + sigma * batch["noise"], t)
    per_row = (predicted - batch["noise"]).square().mean(1)
    return (min_snr(alpha_bar) * per_row).mean()


case = Case(model=Denoiser, batch=samples, loss=loss, layout="1x3")


class Predivide:
    def __init__(self, group=None):
        self.group = group or dist.group.WORLD
        world = self.group.size()
        self.pre = self.factor(world)
        self.post = world // self.pre

    @staticmethod
    def factor(world):
        factor = 1
        while world % factor == 0 and world / factor > factor:
            factor *= 2
        return factor


def predivide_hook(state, bucket):
    buffer = bucket.buffer().div_(state.pre)
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].div_(state.post))


def wrap(model):
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    ddp.register_comm_hook(Predivide(), predivide_hook)
    return ddp


def step(model, shard, rank):
    ddp = wrap(model)
    loss(ddp, shard).backward()
