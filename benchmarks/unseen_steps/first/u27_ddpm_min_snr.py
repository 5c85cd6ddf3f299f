"""Noise prediction of a small conditional diffusion model with min-SNR weights. Each rank walks through its
shard in micro-batches under DDP and synchronises on the last one."""
import contextlib
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

STEPS, GAMMA = 50, 5.0
MICRO_BATCH = 5


def alpha_bar(t):
    return torch.cos((t.double() / STEPS + 0.008) / 1.008 * math.pi / 2).pow(2).clamp(1e-4, 0.9999)


def time_embedding(t, dim=8):
    freq = torch.exp(torch.arange(dim // 2) * (-math.log(100.0) / (dim // 2)))
    angle = t[:, None] * freq[None, :]
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class Denoiser(nn.Module):
    def __init__(self, channels=12, classes=5):
        super().__init__()
        self.inp = nn.Conv2d(1, channels, 3, padding=1)
        self.mid = nn.Conv2d(channels, channels, 3, padding=1)
        self.out = nn.Conv2d(channels, 1, 3, padding=1)
        self.time = nn.Linear(8, channels)
        self.label = nn.Embedding(classes, channels)

    def forward(self, x, t, y):
        cond = self.time(time_embedding(t).to(x.dtype)) + self.label(y)
        h = F.silu(self.inp(x) + cond[:, :, None, None])
        h = h + F.silu(self.mid(h))
        return self.out(h)


def build_model():
    return Denoiser()


def make_batch(generator):
    n = 24
    return {
        "x0": torch.randn(n, 1, 6, 6, generator=generator).tanh(),
        "noise": torch.randn(n, 1, 6, 6, generator=generator),
        "t": torch.randint(1, STEPS, (n,), generator=generator),
        "y": torch.randint(0, 5, (n,), generator=generator),
    }


def diffusion_loss(net, batch):
    """Mean over the samples of the weighted noise error."""
    a = alpha_bar(batch["t"]).to(batch["x0"].dtype)
    view = a[:, None, None, None]
    noisy = view.sqrt() * batch["x0"] + (1 - view).sqrt() * batch["noise"]
    error = (net(noisy, batch["t"], batch["y"]) - batch["noise"]).pow(2).mean(dim=(1, 2, 3))
    snr = a / (1 - a)
    weight = snr.clamp(max=GAMMA) / snr
    return (weight * error).mean()


def loss(model, batch):
    return diffusion_loss(model, batch)


def micro_batches(shard, size):
    rows = next(iter(shard.values())).shape[0]
    for start in range(0, rows, size):
        yield {name: value[start:start + size] for name, value in shard.items()}


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DDP(model)
    micros = list(micro_batches(shard, MICRO_BATCH))
    for i, micro in enumerate(micros):
        last = i == len(micros) - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            value = diffusion_loss(ddp, micro) / len(micros)
            value.backward()
