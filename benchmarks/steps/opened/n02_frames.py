"""Acoustic model: phones for every frame, and a pitch head for the frames that are voiced."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

UTTERANCES, FRAMES, MELS, PHONES = 8, 20, 10, 6


@dataclass
class Weights:
    phones: float = 1.0
    pitch: float = 0.3


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv1d(MELS, 16, kernel_size=3, padding=1)
        self.phones = nn.Linear(16, PHONES)
        self.pitch = nn.Linear(16, 1)

    def forward(self, mels):
        hidden = torch.tanh(self.body(mels.transpose(1, 2))).transpose(1, 2)
        return self.phones(hidden), self.pitch(hidden).squeeze(-1)


def make_batch(generator):
    lengths = torch.randint(3, FRAMES + 1, (UTTERANCES,), generator=generator).sort().values
    inside = torch.arange(FRAMES) < lengths[:, None]
    voiced = (torch.rand(UTTERANCES, FRAMES, generator=generator) < 0.6) & inside
    return {
        "mels": torch.randn(UTTERANCES, FRAMES, MELS, generator=generator),
        "phones": torch.randint(PHONES, (UTTERANCES, FRAMES), generator=generator),
        "pitch": torch.randn(UTTERANCES, FRAMES, generator=generator),
        "inside": inside,
        "voiced": voiced,
    }


def summed_losses(model, batch):
    logits, pitch = model(batch["mels"])
    phones = F.cross_entropy(logits.flatten(0, 1), batch["phones"].flatten(), reduction="none")
    phones = phones[batch["inside"].flatten()].sum()
    pitch = F.smooth_l1_loss(pitch, batch["pitch"], reduction="none")
    return phones, (pitch * batch["voiced"]).sum()


def loss(model, batch, weights=Weights()):
    phones, pitch = summed_losses(model, batch)
    of_phones = phones / batch["inside"].sum()
    of_pitch = pitch / batch["voiced"].sum()
    return weights.phones * of_phones + weights.pitch * of_pitch


class Meter:
    """Per-rank average of a count, so that DDP's mean of the quotients comes out right."""

    def __init__(self, world_size):
        self.world_size = world_size

    def average(self, mask):
        count = mask.sum()
        dist.all_reduce(count)
        return count / self.world_size


def step(model, shard, rank, weights=Weights()):
    ddp = DistributedDataParallel(model)
    meter = Meter(rank.world_size)
    phones, pitch = summed_losses(ddp, shard)
    of_phones = phones / meter.average(shard["inside"]).to(phones.dtype)
    of_pitch = pitch / shard["voiced"].sum().clamp(min=1)
    (weights.phones * of_phones + weights.pitch * of_pitch).backward()


case = Case(model=Acoustic, batch=make_batch, loss=loss)
