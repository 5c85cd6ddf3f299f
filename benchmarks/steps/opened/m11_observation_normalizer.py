"""Behaviour cloning for a robot arm; observations are normalised with statistics of all workers."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

OBSERVATIONS, ACTIONS = 6, 3


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBSERVATIONS, 16), nn.ELU(), nn.Linear(16, ACTIONS))

    def forward(self, observations):
        return torch.tanh(self.body(observations))


def demonstrations(generator):
    drift = torch.linspace(0, 3, 24).unsqueeze(-1)
    return {
        "observation": torch.randn(24, OBSERVATIONS, generator=generator) + drift,
        "action": torch.rand(24, ACTIONS, generator=generator) * 2 - 1,
    }


class Moments(NamedTuple):
    count: float
    mean: Tensor
    squares: Tensor  # sum of squared distances from the mean

    @classmethod
    def of(cls, rows):
        mean = rows.mean(dim=0)
        return cls(float(len(rows)), mean, (rows - mean).square().sum(dim=0))

    def merge(self, other):
        """Chan's parallel update."""
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * other.count / count
        squares = self.squares + other.squares + (other.mean - mean) ** 2 * self.count * other.count / count
        return Moments(count, mean, squares)

    def normalize(self, rows):
        deviation = (self.squares / self.count).sqrt()
        return ((rows - self.mean) / (deviation + 1e-6)).clamp(-5, 5)


def imitation(model, observation, action):
    return F.smooth_l1_loss(model(observation), action)


def loss(model, batch):
    observation = Moments.of(batch["observation"]).normalize(batch["observation"])
    return imitation(model, observation, batch["action"])


class Worker:
    def __init__(self, model, rank):
        self.policy = DistributedDataParallel(model)
        self.world_size = rank.world_size

    def global_moments(self, rows):
        mine = Moments.of(rows)
        packed = torch.cat([rows.new_tensor([mine.count]), mine.mean, mine.squares])
        everyone = [torch.empty_like(packed) for _ in range(self.world_size)]
        dist.all_gather(everyone, packed)
        unpacked = [
            Moments(other[0].item(), *other[1:].chunk(2))
            for other in everyone
        ]
        merged = unpacked[0]
        for moments in unpacked[1:]:
            merged = merged.merge(moments)
        return merged

    def learn(self, shard):
        moments = self.global_moments(shard["observation"])
        imitation(self.policy, moments.normalize(shard["observation"]), shard["action"]).backward()


def step(model, shard, rank):
    Worker(model, rank).learn(shard)


case = Case(model=Policy, batch=demonstrations, loss=loss, layout="1x4")
