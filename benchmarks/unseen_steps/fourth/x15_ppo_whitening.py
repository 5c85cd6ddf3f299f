"""One PPO update of an actor-critic whose advantages are whitened over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

OBSERVATION, ACTIONS, HORIZON = 6, 4, 5


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(OBSERVATION, 12), nn.Tanh(), nn.Linear(12, 12))
        self.actor = nn.Linear(12, ACTIONS)
        self.critic = nn.Linear(12, 1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(observations))
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def discounted_advantages(
    rewards: Tensor, values: Tensor, gamma: float = 0.98, smoothing: float = 0.95
) -> Tensor:
    """Generalized advantage estimates of (episodes, HORIZON)."""
    following = F.pad(values[:, 1:], (0, 1))
    deltas = rewards + gamma * following - values
    running = torch.zeros_like(deltas[:, 0])
    result = []
    for time in reversed(range(deltas.shape[1])):
        running = deltas[:, time] + gamma * smoothing * running
        result.append(running)
    return torch.stack(result[::-1], dim=1)


def surrogate(
    model: nn.Module, batch: dict[str, Tensor], whitened: Tensor, returns: Tensor
) -> Tensor:
    logits, values = model(batch["observations"])
    log_probs = logits.log_softmax(dim=-1)
    taken = log_probs.gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
    ratio = (taken - batch["old_log_probs"]).exp()
    gain = torch.minimum(ratio * whitened, ratio.clamp(0.8, 1.2) * whitened).mean()
    return 0.5 * F.mse_loss(values, returns) - gain


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    advantages = discounted_advantages(batch["rewards"], batch["old_values"])
    spread = advantages.var(unbiased=False)
    whitened = (advantages - advantages.mean()) / (spread + 1e-8).sqrt()
    return surrogate(model, batch, whitened, advantages + batch["old_values"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Episodes ordered by level; the later levels pay better."""
    shape = (12, HORIZON)
    level = torch.linspace(0.0, 2.0, 12).unsqueeze(1)
    return {
        "observations": torch.randn(*shape, OBSERVATION, generator=generator),
        "actions": torch.randint(ACTIONS, shape, generator=generator),
        "rewards": level + torch.rand(shape, generator=generator),
        "old_values": torch.randn(shape, generator=generator),
        "old_log_probs": -1.4 + 0.2 * torch.randn(shape, generator=generator),
    }


class Whitener:
    """Normalizes values with moments of all ranks, which have equally many values."""

    def __init__(self, world_size: int, epsilon: float = 1e-8) -> None:
        self.world_size = world_size
        self.epsilon = epsilon

    def over_ranks(self, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value / self.world_size

    def __call__(self, values: Tensor) -> Tensor:
        mean = self.over_ranks(values.mean())
        variance = self.over_ranks(values.var(unbiased=False))
        return (values - mean) * torch.rsqrt(variance + self.epsilon)


class PPOLearner:
    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.ddp = DistributedDataParallel(model)
        self.whiten = Whitener(world_size)

    def update(self, rollout: dict[str, Tensor]) -> None:
        advantages = discounted_advantages(rollout["rewards"], rollout["old_values"])
        returns = advantages + rollout["old_values"]
        surrogate(self.ddp, rollout, self.whiten(advantages), returns).backward()


case = Case(model=ActorCritic, batch=make_batch, loss=loss, layout="1x3")


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    PPOLearner(model, rank.world_size).update(shard)
