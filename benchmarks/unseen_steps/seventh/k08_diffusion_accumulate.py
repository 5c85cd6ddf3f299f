"""Noise prediction for small signals, with two micro-batches a step and one exchange."""
import math
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

SIGNAL, STEPS, ACCUMULATE = 10, 50, 2


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(2, 12)
        self.inp = nn.Linear(SIGNAL, 12)
        self.out = nn.Linear(12, SIGNAL)

    def forward(self, noisy, t):
        phase = t / STEPS * math.pi / 2
        clock = torch.stack([phase.sin(), phase.cos()], dim=-1)
        return self.out(torch.nn.functional.silu(self.inp(noisy) + self.time(clock)))


def make_batch(generator):
    n = 16
    return {
        "clean": torch.randn(n, SIGNAL, generator=generator).cumsum(-1) / 3,
        "noise": torch.randn(n, SIGNAL, generator=generator),
        "t": torch.randint(1, STEPS, (n,), generator=generator).float(),
    }


def alpha_bar(t):
    return torch.cos(t / STEPS * math.pi / 2).square()


def loss(model, batch):
    keep = alpha_bar(batch["t"]).unsqueeze(-1)
    noisy = keep.sqrt() * batch["clean"] + (1 - keep).sqrt() * batch["noise"]
    weight = (1 + keep.squeeze(-1)).reciprocal()
    error = (model(noisy, batch["t"]) - batch["noise"]).square().mean(-1)
    return (weight * error).mean()


def micro_batches(shard, count):
    parts = {key: value.chunk(count) for key, value in shard.items()}
    return [{key: parts[key][i] for key in parts} for i in range(count)]


def sync_context(ddp, index):
    """Gradients travel with the last micro-batch only."""
    return ddp.no_sync() if index % ACCUMULATE else nullcontext()


def step(model, shard, rank):
    ddp = DDP(model)
    for index, micro in enumerate(micro_batches(shard, ACCUMULATE)):
        with sync_context(ddp, index):
            (loss(ddp, micro) / ACCUMULATE).backward()


case = Case(model=Denoiser, batch=make_batch, loss=loss)
