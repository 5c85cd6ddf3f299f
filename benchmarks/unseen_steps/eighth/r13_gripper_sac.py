"""A robot's gripper: soft actor with a temperature that is tuned along with the policy."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

STATES, OBSERVED, ACTIONS = 24, 8, 2
TARGET_ENTROPY = -float(ACTIONS)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(OBSERVED, 12), nn.Tanh())
        self.mean = nn.Linear(12, ACTIONS)
        self.log_std = nn.Linear(12, ACTIONS)

    def forward(self, state, noise):
        hidden = self.trunk(state)
        log_std = self.log_std(hidden).clamp(-3, 1)
        action = self.mean(hidden) + noise * log_std.exp()
        log_chance = (-0.5 * noise**2 - log_std - 0.919).sum(-1)
        return action.tanh(), log_chance - (1 - action.tanh() ** 2 + 1e-6).log().sum(-1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = Policy()
        self.log_alpha = nn.Parameter(torch.tensor(-0.5))


def make_batch(generator):
    return {
        "state": torch.randn(STATES, OBSERVED, generator=generator),
        "noise": torch.randn(STATES, ACTIONS, generator=generator),
        "best": torch.rand(STATES, ACTIONS, generator=generator) * 2 - 1,
    }


def value_of(action, batch):
    """A critic that has been trained already."""
    return -(action - batch["best"]).square().sum(-1)


def actor_loss(action, log_chance, alpha, batch):
    return (alpha.detach() * log_chance - value_of(action, batch)).mean()


def temperature_loss(log_chance, log_alpha):
    return -(log_alpha.exp() * (log_chance.detach() + TARGET_ENTROPY)).mean()


def loss(model, batch):
    action, log_chance = model.policy(batch["state"], batch["noise"])
    alpha = model.log_alpha.exp()
    return actor_loss(action, log_chance, alpha, batch) + temperature_loss(
        log_chance, model.log_alpha
    )


class Learner:
    def __init__(self, agent):
        self.agent = agent
        self.policy = DistributedDataParallel(agent.policy)

    def update(self, batch):
        action, log_chance = self.policy(batch["state"], batch["noise"])
        alpha = self.agent.log_alpha.exp()
        actor_loss(action, log_chance, alpha, batch).backward()
        self.tune(log_chance)

    def tune(self, log_chance):
        temperature_loss(log_chance, self.agent.log_alpha).backward()


def step(model, shard, rank):
    Learner(model).update(shard)


case = Case(model=Agent, batch=make_batch, loss=loss, layout="1x2")
