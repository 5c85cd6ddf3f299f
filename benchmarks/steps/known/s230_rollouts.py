"""Advantage actor-critic on recorded rollouts, with generalised advantages per environment."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

HORIZON = 7
ACTIONS = 3
GAMMA, LAMBDA = 0.95, 0.9

Rollouts = dict[str, Tensor]


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 12), nn.Tanh())
        self.actor = nn.Linear(12, ACTIONS)
        self.critic = nn.Linear(12, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(seen)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def objective(model: nn.Module, batch: Rollouts, advantages: Tensor) -> Tensor:
    logits, values = model(batch["seen"])
    chosen = logits.log_softmax(-1).gather(-1, batch["action"][..., None]).squeeze(-1)
    returns = advantages + batch["value"][:, :-1]
    return 0.5 * F.mse_loss(values, returns) - (chosen * advantages).mean()


def loss(model: nn.Module, batch: Rollouts) -> Tensor:
    goes_on = 1.0 - batch["first"][:, 1:].to(batch["value"].dtype)
    surprise = batch["reward"] + GAMMA * goes_on * batch["value"][:, 1:] - batch["value"][:, :-1]
    advantages = surprise.clone()
    for start in range(HORIZON):
        weight = torch.ones_like(advantages[:, 0])
        for later in range(start + 1, HORIZON):
            weight = weight * GAMMA * LAMBDA * goes_on[:, later - 1]
            advantages[:, start] += weight * surprise[:, later]
    return objective(model, batch, advantages)


def make_batch(generator: torch.Generator) -> Rollouts:
    """Column t of "first" is set if the observation at t is the first of an episode."""
    return {
        "seen": torch.randn(12, HORIZON, 5, generator=generator),
        "action": torch.randint(0, ACTIONS, (12, HORIZON), generator=generator),
        "reward": torch.rand(12, HORIZON, generator=generator),
        "first": torch.rand(12, HORIZON + 1, generator=generator) < 0.2,
        "value": torch.randn(12, HORIZON + 1, generator=generator),
    }


case = Case(model=ActorCritic, batch=make_batch, loss=loss, layout="1x2")


class RolloutBuffer:
    """Recorded steps in the order of time, one column per environment."""

    def __init__(self, batch: Rollouts) -> None:
        self.rewards = batch["reward"].T
        self.values = batch["value"].T
        self.ongoing = 1.0 - batch["first"].T.to(self.values.dtype)

    def advantages(self) -> Tensor:
        result = torch.zeros_like(self.rewards)
        running = torch.zeros_like(self.rewards[0])
        for t in reversed(range(HORIZON)):
            ongoing = self.ongoing[t]
            delta = self.rewards[t] + GAMMA * ongoing * self.values[t + 1] - self.values[t]
            running = delta + GAMMA * LAMBDA * ongoing * running
            result[t] = running
        return result.T


def step(model: nn.Module, shard: Rollouts, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    objective(ddp, shard, RolloutBuffer(shard).advantages()).backward()
