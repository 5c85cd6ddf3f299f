"""PPO update of an actor-critic on rollouts that are spread over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

OBSERVATION, ACTIONS, ROLLOUT = 6, 4, 16


@dataclass(frozen=True)
class PPOConfig:
    clip_range: float = 0.2
    value_coefficient: float = 0.5
    entropy_coefficient: float = 0.01
    epsilon: float = 1e-8


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBSERVATION, 16), nn.Tanh())
        self.actor = nn.Linear(16, ACTIONS)
        self.critic = nn.Linear(16, 1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(observations)
        return self.actor(hidden).log_softmax(-1), self.critic(hidden).squeeze(-1)


def sum_over_ranks(value: Tensor) -> Tensor:
    value = value.detach().clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value)
    return value


def whiten(values: Tensor, epsilon: float) -> Tensor:
    """Zero mean and unit variance over the rollouts of all workers."""
    count = sum_over_ranks(torch.full_like(values, 1.0).sum())
    mean = sum_over_ranks(values.sum()) / count
    deviation = values - values.mean()
    variance = sum_over_ranks(deviation.square().sum()) / count
    return (values - mean) * torch.rsqrt(variance + epsilon)


def ppo_loss(
    model: nn.Module, rollout: dict[str, Tensor], config: PPOConfig = PPOConfig()
) -> Tensor:
    log_probs, values = model(rollout["observations"])
    advantages = whiten(rollout["advantages"], config.epsilon)
    taken = log_probs.gather(-1, rollout["actions"].unsqueeze(-1)).squeeze(-1)
    ratio = (taken - rollout["old_log_probs"]).exp()
    clipped = ratio.clamp(1 - config.clip_range, 1 + config.clip_range)
    policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    value_loss = (values - rollout["returns"]).square().mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return (
        policy_loss
        + config.value_coefficient * value_loss
        - config.entropy_coefficient * entropy
    )


def make_rollout(generator: torch.Generator) -> dict[str, Tensor]:
    returns = torch.randn(ROLLOUT, generator=generator)
    return {
        "observations": torch.randn(ROLLOUT, OBSERVATION, generator=generator),
        "actions": torch.randint(ACTIONS, (ROLLOUT,), generator=generator),
        "old_log_probs": -1.4 + 0.1 * torch.randn(ROLLOUT, generator=generator),
        "returns": returns,
        "advantages": returns + torch.randn(ROLLOUT, generator=generator),
    }


class PPOLearner:
    def __init__(self, policy: nn.Module, config: PPOConfig) -> None:
        self.policy = DistributedDataParallel(policy)
        self.config = config

    def update(self, rollout: dict[str, Tensor]) -> Tensor:
        self.policy.zero_grad(set_to_none=True)
        loss = ppo_loss(self.policy, rollout, self.config)
        loss.backward()
        return loss.detach()


case = Case(model=ActorCritic, batch=make_rollout, loss=ppo_loss, layout="1x2")


def step(model, shard, rank):
    PPOLearner(model, PPOConfig()).update(shard)
