"""PPO's clipped surrogate with advantages whitened over the rollouts of all workers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

STATE, ACTIONS, CLIP, ENTROPY = 6, 4, 0.2, 0.01


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATE, 16), nn.Tanh())
        self.pi = nn.Linear(16, ACTIONS)
        self.value = nn.Linear(16, 1)

    def forward(self, state):
        hidden = self.body(state)
        return self.pi(hidden).log_softmax(-1), self.value(hidden).squeeze(-1)


def rollouts(generator):
    n = 24
    # workers meet levels of different difficulty: rewards differ in spread
    spread = torch.linspace(0.3, 3.0, n)
    return {
        "state": torch.randn(n, STATE, generator=generator),
        "action": torch.randint(0, ACTIONS, (n,), generator=generator),
        "old_logp": -1.4 + 0.2 * torch.randn(n, generator=generator),
        "advantage": spread * torch.randn(n, generator=generator) + 0.5,
        "returns": torch.randn(n, generator=generator),
    }


def surrogate(model, batch, advantage):
    logp, value = model(batch["state"])
    taken = logp.gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    ratio = (taken - batch["old_logp"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy = -torch.min(ratio * advantage, clipped * advantage).mean()
    critic = F.smooth_l1_loss(value, batch["returns"])
    entropy = -(logp.exp() * logp).sum(-1).mean()
    return policy + 0.5 * critic - ENTROPY * entropy


def loss(model, batch):
    advantage = batch["advantage"]
    centred = advantage - advantage.mean()
    return surrogate(model, batch, centred / (centred.pow(2).mean() + 1e-8).sqrt())


class Worker:
    def __init__(self, model, rank):
        self.model, self.world = model, rank.world_size

    def mean(self, value):
        value = value.clone()
        dist.all_reduce(value)
        return value / self.world

    def whiten(self, advantage):
        centre = self.mean(advantage.mean())
        centred = advantage - centre
        spread = centred.pow(2).mean()
        return centred / (spread + 1e-8).sqrt()

    def update(self, shard):
        surrogate(self.model, shard, self.whiten(shard["advantage"])).backward()
        for parameter in self.model.parameters():
            parameter.grad = self.mean(parameter.grad)


def step(model, shard, rank):
    Worker(model, rank).update(shard)


case = Case(model=Policy, batch=rollouts, loss=loss, layout="1x4")
