"""A denoiser of 1-d signals (diffusion), trained with accumulated gradients on three workers."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

SIGNALS, POINTS, TIMES = 18, 16, 50
betas = torch.linspace(1e-3, 0.08, TIMES, dtype=torch.float64)
ALPHA_BAR = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(TIMES, 8)
        self.into = nn.Linear(POINTS + 8, 32)
        self.out = nn.Linear(32, POINTS)

    def forward(self, noisy, t):
        return self.out(torch.sin(self.into(torch.cat([noisy, self.time(t)], -1))))


def signals(g):
    # noise and times are drawn with the batch, so that they do not depend on the rank
    return {
        "clean": torch.randn(SIGNALS, POINTS, generator=g).cumsum(1) / 4,
        "noise": torch.randn(SIGNALS, POINTS, generator=g),
        "t": torch.randint(0, TIMES, (SIGNALS,), generator=g),
    }


def loss(model, batch):
    kept = ALPHA_BAR[batch["t"]].to(batch["clean"].dtype)[:, None]
    noisy = kept.sqrt() * batch["clean"] + (1 - kept).sqrt() * batch["noise"]
    error = (model(noisy, batch["t"]) - batch["noise"]).pow(2).mean(1)
    snr = (kept / (1 - kept)).squeeze(1)
    return (error * snr.clamp(max=5.0) / snr).mean()


class Accumulator:
    """Adds up gradients; `flush` makes them the same everywhere."""

    def __init__(self, model, micro_size=2, every=4):
        self.model, self.micro_size, self.every = model, micro_size, every
        self.seen = 0

    def micro_batches(self, shard):
        count = len(shard["t"])
        for start in range(0, count, self.micro_size):
            yield {name: t[start : start + self.micro_size] for name, t in shard.items()}

    def run(self, shard):
        self.seen = 0
        for micro in self.micro_batches(shard):
            (loss(self.model, micro) / self.every).backward()
            self.seen += 1
            if self.seen == self.every:
                self.flush()
                self.seen = 0
        if self.seen:  # an unfinished window at the end
            self.flush()

    def flush(self):
        world = dist.get_world_size()
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world


case = Case(model=Denoiser, batch=signals, loss=loss, layout="1x3")


def step(model, shard, rank):
    Accumulator(model).run(shard)
