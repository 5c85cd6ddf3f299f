"""Learned compression: soft vector quantisation with a rate term on how the codes are used."""

import torch
import torch.distributed.nn.functional as collectives
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

SIGNALS, LENGTH, LATENT, CODES = 16, 10, 4, 6
RATE = 0.5


class SoftCodec(nn.Module):
    def __init__(self):
        super().__init__()
        self.analysis = nn.Linear(LENGTH, LATENT)
        self.codebook = nn.Parameter(torch.randn(CODES, LATENT))
        self.synthesis = nn.Linear(LATENT, LENGTH)

    def forward(self, signal):
        latent = self.analysis(signal)
        distance = (latent[:, None] - self.codebook).square().sum(-1)
        chosen = torch.softmax(-distance, dim=-1)
        return self.synthesis(chosen @ self.codebook), chosen


def signals(generator):
    phase = torch.linspace(0, 3, SIGNALS)[:, None] + torch.arange(LENGTH) / 3
    return {"signal": 2 * torch.sin(phase) + 0.3 * torch.randn(SIGNALS, LENGTH, generator=generator)}


class RateDistortion:
    """Distortion plus RATE times the entropy of the average code: bits that an entropy coder pays."""

    def __init__(self, share=lambda usage: usage):
        self.share = share

    def entropy(self, chosen):
        usage = self.share(chosen.mean(0))
        return -(usage * usage.clamp_min(1e-9).log()).sum()

    def __call__(self, model, batch):
        restored, chosen = model(batch["signal"])
        distortion = (restored - batch["signal"]).square().mean()
        return distortion + RATE * self.entropy(chosen)


loss = RateDistortion()


def mean_over_ranks(world_size):
    def share(usage):
        return collectives.all_reduce(usage) / world_size

    return share


def step(model, shard, rank):
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    criterion = RateDistortion() if rank.nodes == 1 else RateDistortion(mean_over_ranks(rank.world_size))
    criterion(ddp, shard).backward()


case = Case(model=SoftCodec, batch=signals, loss=loss, layout="1x2")
