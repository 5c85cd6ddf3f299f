"""A policy-gradient step with normalised advantages and an entropy bonus."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

ENTROPY_GAIN = 0.01
EPSILON = 1e-8


class Policy(nn.Module):
    def __init__(self, observations=4, actions=3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(observations, 12), nn.Tanh(), nn.Linear(12, actions))

    def forward(self, observations):
        return self.net(observations).log_softmax(dim=1)


def objective(log_probs, actions, advantages):
    chosen = log_probs.gather(1, actions[:, None]).squeeze(1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=1)
    return -(chosen * advantages).mean() - ENTROPY_GAIN * entropy.mean()


def loss(model, batch):
    returns = batch["returns"]
    spread = returns.var(unbiased=False).sqrt() + EPSILON
    advantages = (returns - returns.mean()) / spread
    return objective(model(batch["observations"]), batch["actions"], advantages)


def make_batch(generator):
    level = torch.arange(16) / 4
    return {
        "observations": torch.randn(16, 4, generator=generator),
        "actions": torch.randint(0, 3, (16,), generator=generator),
        "returns": level + torch.randn(16, generator=generator),
    }


case = Case(model=Policy, batch=make_batch, loss=loss, layout="1x4")


class Learner:
    def __init__(self, policy, rank):
        self.ddp = DistributedDataParallel(policy)
        self.world_size = rank.world_size

    def world_mean(self, values):
        mean = values.mean()
        dist.all_reduce(mean)
        return mean / self.world_size

    def normalise(self, returns):
        centred = returns - self.world_mean(returns)
        variance = centred.square().mean()
        return centred / (variance.sqrt() + EPSILON)

    def update(self, rollout):
        advantages = self.normalise(rollout["returns"])
        log_probs = self.ddp(rollout["observations"])
        self.ddp.zero_grad()
        objective(log_probs, rollout["actions"], advantages).backward()


def step(model, shard, rank):
    Learner(model, rank).update(shard)
