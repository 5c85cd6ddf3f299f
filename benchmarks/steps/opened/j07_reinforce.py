"""REINFORCE with a Gaussian policy on finished episodes, and whitened returns."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Normal

from ddp_equivalence import Case

OBSERVED, CONTROLS, HORIZON = 6, 2, 5
ENTROPY_BONUS = 0.01


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(OBSERVED, 14), nn.Tanh(), nn.Linear(14, CONTROLS))
        self.log_std = nn.Parameter(torch.full((CONTROLS,), -0.3))

    def forward(self, observations: Tensor) -> Normal:
        return Normal(self.mean(observations), self.log_std.exp())


def discounted(rewards: Tensor, gamma: float = 0.95) -> Tensor:
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for moment in reversed(range(rewards.shape[1])):
        running = rewards[:, moment] + gamma * running
        returns[:, moment] = running
    return returns


def whiten(returns: Tensor) -> Tensor:
    return (returns - returns.mean()) / (returns.std(unbiased=False) + 1e-8)


def surrogate(policy: nn.Module, episodes: dict, advantages: Tensor) -> Tensor:
    chosen = policy(episodes["observations"])
    log_probability = chosen.log_prob(episodes["actions"]).sum(-1)
    return -(log_probability * advantages).mean() - ENTROPY_BONUS * chosen.entropy().mean()


def loss(model: nn.Module, batch: dict) -> Tensor:
    return surrogate(model, batch, whiten(discounted(batch["rewards"])))


class Learner:
    """One of several actors that learn in lockstep."""

    def __init__(self, policy: nn.Module, workers: int):
        self.policy = policy
        self.workers = workers

    @contextlib.contextmanager
    def lockstep(self):
        self.policy.zero_grad(set_to_none=False)
        yield
        for parameter in self.policy.parameters():
            parameter.grad.div_(self.workers)
            dist.all_reduce(parameter.grad)

    def learn(self, episodes: dict) -> None:
        returns = discounted(episodes["rewards"])
        with self.lockstep():
            advantages = whiten(returns)
            surrogate(self.policy, episodes, advantages).backward()


def episodes(generator: torch.Generator) -> dict:
    count = 16
    luck = torch.linspace(0, 2, count).unsqueeze(1)
    return {
        "observations": torch.randn(count, HORIZON, OBSERVED, generator=generator),
        "actions": torch.randn(count, HORIZON, CONTROLS, generator=generator),
        "rewards": torch.randn(count, HORIZON, generator=generator) + luck,
    }


case = Case(model=Policy, batch=episodes, loss=loss, layout="1x2")


def step(model: nn.Module, shard: dict, rank) -> None:
    Learner(model, rank.world_size).learn(shard)
