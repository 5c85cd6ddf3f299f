"""Playlist continuation with BPR. A pair's weight is its inverse popularity, relative to the largest in the batch."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass(frozen=True)
class Config:
    listeners: int = 15
    tracks: int = 40
    width: int = 6
    pairs: int = 32
    power: float = 0.75


CFG = Config()


class Factorisation(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.listener = nn.Embedding(cfg.listeners, cfg.width)
        self.track = nn.Embedding(cfg.tracks, cfg.width)
        self.offset = nn.Embedding(cfg.tracks, 1)

    def forward(self, listener, track):
        affinity = (self.listener(listener) * self.track(track)).sum(-1)
        return affinity + self.offset(track).squeeze(-1)


def make_batch(generator):
    def pick(high):
        return torch.randint(high, (CFG.pairs,), generator=generator)

    return {
        "listener": pick(CFG.listeners),
        "heard": pick(CFG.tracks),
        "unheard": pick(CFG.tracks),
        "plays": torch.rand(CFG.pairs, generator=generator) * 90 + 10,
    }


def inverse_popularity(plays):
    return plays.pow(-CFG.power)


def margin(model, batch):
    return model(batch["listener"], batch["heard"]) - model(batch["listener"], batch["unheard"])


def loss(model, batch):
    weight = inverse_popularity(batch["plays"])
    weight = weight / weight.max()
    return -(weight * F.logsigmoid(margin(model, batch))).mean()


class BprTrainer:
    def __init__(self, model, world_size):
        self.model = model
        self.world_size = world_size

    def relative_weight(self, plays):
        weight = inverse_popularity(plays)
        largest = weight.max().clone()
        # one scale for everybody, or ranks with rare tracks would be louder
        dist.all_reduce(largest)
        return weight / largest

    def backward(self, shard):
        weight = self.relative_weight(shard["plays"])
        value = -(weight * F.logsigmoid(margin(self.model, shard))).mean()
        value.backward()

    def synchronise(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self.world_size)


def step(model, shard, rank):
    trainer = BprTrainer(model, rank.world_size)
    trainer.backward(shard)
    trainer.synchronise()


case = Case(model=lambda: Factorisation(CFG), batch=make_batch, loss=loss, layout="1x4")
