"""PPO's clipped objective. Advantages are whitened with the moments of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

STATES, ACTIONS, STEPS = 5, 3, 16


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(STATES, 12), nn.Tanh())
        self.actor, self.critic = nn.Linear(12, ACTIONS), nn.Linear(12, 1)

    def forward(self, state):
        hidden = self.trunk(state)
        return self.actor(hidden).log_softmax(-1), self.critic(hidden).squeeze(-1)


class Moments:
    def mean(self, x):
        return x.mean()

    def whiten(self, x, tiny=1e-8):
        centre = self.mean(x)
        variance = self.mean((x - centre).square())
        return (x - centre) / (variance + tiny).sqrt()


class MomentsOfAllRanks(Moments):
    def __init__(self, group=None):
        self.group = group

    def mean(self, x):
        pair = torch.stack([x.sum(), torch.full_like(x, 1.0).sum()])
        dist.all_reduce(pair, group=self.group)
        return pair[0] / pair[1]

    def whiten(self, x, tiny=1e-8):
        centre = self.mean(x)
        variance = self.mean((x - x.mean()).square())
        return (x - centre) / (variance + tiny).sqrt()


class Ppo:
    def __init__(self, moments, epsilon=0.2, value=0.5, entropy=0.01):
        self.moments = moments
        self.epsilon, self.value, self.entropy = epsilon, value, entropy

    def __call__(self, model, steps):
        logs, values = model(steps["state"])
        chosen = logs.gather(-1, steps["action"].unsqueeze(-1)).squeeze(-1)
        ratio = (chosen - steps["old"]).exp()
        gain = self.moments.whiten(steps["advantage"])
        bounded = ratio.clamp(1 - self.epsilon, 1 + self.epsilon)
        policy = -torch.minimum(ratio * gain, bounded * gain).mean()
        critic = (values - steps["return"]).square().mean()
        entropy = -(logs.exp() * logs).sum(-1).mean()
        return policy + self.value * critic - self.entropy * entropy


def rollout(generator):
    """The advantage drifts, as episodes of good luck come first."""
    luck = torch.linspace(2, -2, STEPS)
    return {
        "state": torch.randn(STEPS, STATES, generator=generator),
        "action": torch.randint(0, ACTIONS, (STEPS,), generator=generator),
        "old": -1.1 + torch.randn(STEPS, generator=generator) / 10,
        "advantage": luck + torch.randn(STEPS, generator=generator),
        "return": torch.randn(STEPS, generator=generator),
    }


def loss(model, batch):
    return Ppo(Moments())(model, batch)


case = Case(model=ActorCritic, batch=rollout, loss=loss, layout="2x2")


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    Ppo(MomentsOfAllRanks())(ddp, shard).backward()
