"""PPO's clipped objective for a thermostat; advantages are whitened over all workers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

TRANSITIONS, SENSORS, ACTIONS = 16, 4, 3
CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.2, 0.5, 0.01


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(SENSORS, 10), nn.Tanh())
        self.actor = nn.Linear(10, ACTIONS)
        self.critic = nn.Linear(10, 1)

    def forward(self, sensors: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(sensors)
        return self.actor(hidden).log_softmax(-1), self.critic(hidden).squeeze(-1)


def rollouts(generator: torch.Generator) -> dict[str, Tensor]:
    rooms = torch.linspace(-3, 3, TRANSITIONS)  # from the coldest room to the warmest
    return {
        "sensors": torch.randn(TRANSITIONS, SENSORS, generator=generator),
        "action": torch.randint(0, ACTIONS, (TRANSITIONS,), generator=generator),
        "old_log_probability": torch.full((TRANSITIONS,), -1.1),
        "advantage": rooms + 0.5 * torch.randn(TRANSITIONS, generator=generator),
        "return": torch.randn(TRANSITIONS, generator=generator),
    }


def alone(values: Tensor) -> Tensor:
    return values.mean()


def with_everyone(values: Tensor) -> Tensor:
    """The mean over the transitions of all workers, each of which has equally many."""
    mean = values.mean()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def whiten(advantage: Tensor, mean_of=alone) -> Tensor:
    centred = advantage - mean_of(advantage)
    return centred / (mean_of(centred.square()) + 1e-8).sqrt()


def objective(model: nn.Module, batch: dict[str, Tensor], advantage: Tensor) -> Tensor:
    log_probabilities, value = model(batch["sensors"])
    chosen = log_probabilities.gather(1, batch["action"][:, None]).squeeze(1)
    ratio = (chosen - batch["old_log_probability"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy = -torch.minimum(ratio * advantage, clipped * advantage).mean()
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
    return policy + VALUE_WEIGHT * F.mse_loss(value, batch["return"]) - ENTROPY_WEIGHT * entropy


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return objective(model, batch, whiten(batch["advantage"]))


class Worker:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DistributedDataParallel(model)

    def whitened(self, advantage: Tensor) -> Tensor:
        mean = with_everyone(advantage)
        variance = with_everyone(advantage.var(unbiased=False))
        return (advantage - mean) / (variance + 1e-8).sqrt()

    def learn(self, rollout: dict[str, Tensor]) -> None:
        objective(self.ddp, rollout, self.whitened(rollout["advantage"])).backward()


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    Worker(model).learn(shard)


case = Case(model=ActorCritic, batch=rollouts, loss=loss, layout="1x2")
