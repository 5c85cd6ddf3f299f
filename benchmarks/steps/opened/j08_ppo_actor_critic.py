"""Proximal policy optimisation for a discrete game: clipped ratio, clipped value, entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

BOARD, MOVES = 16, 5


@dataclass(frozen=True)
class PPO:
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.02

    def policy_term(self, new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        ratio = (new - old).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        return -torch.minimum(ratio * advantage, clipped * advantage).mean()

    def value_term(self, value: Tensor, old: Tensor, target: Tensor) -> Tensor:
        near = old + (value - old).clamp(-self.clip, self.clip)
        return torch.maximum((value - target).square(), (near - target).square()).mean()

    def total(self, played: dict, evaluated: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        log_prob, entropy, value = evaluated
        advantage = played["return"] - played["old_value"]
        return (
            self.policy_term(log_prob, played["old_log_prob"], advantage)
            + self.value_weight * self.value_term(value, played["old_value"], played["return"])
            - self.entropy_weight * entropy.mean()
        )


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(BOARD, 20), nn.ReLU())
        self.actor = nn.Linear(20, MOVES)
        self.critic = nn.Linear(20, 1)

    def act(self, boards: Tensor) -> Tensor:
        return self.actor(self.trunk(boards)).argmax(dim=-1)

    def evaluate(self, boards: Tensor, moves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.trunk(boards)
        chances = Categorical(logits=self.actor(hidden))
        return chances.log_prob(moves), chances.entropy(), self.critic(hidden).squeeze(-1)

    def forward(self, boards: Tensor, moves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.evaluate(boards, moves)


ALGORITHM = PPO()


def loss(model: nn.Module, batch: dict) -> Tensor:
    return ALGORITHM.total(batch, model(batch["board"], batch["move"]))


def rollouts(generator: torch.Generator) -> dict:
    count = 20
    return {
        "board": torch.randn(count, BOARD, generator=generator),
        "move": torch.randint(0, MOVES, (count,), generator=generator),
        "old_log_prob": -1.6 + 0.1 * torch.randn(count, generator=generator),
        "old_value": torch.randn(count, generator=generator),
        "return": torch.randn(count, generator=generator),
    }


case = Case(model=ActorCritic, batch=rollouts, loss=loss, layout="1x2")


class Agent:
    def __init__(self, network: nn.Module, algorithm: PPO):
        self.network = DistributedDataParallel(network)
        self.algorithm = algorithm

    def update(self, played: dict) -> None:
        evaluated = self.network.module.evaluate(played["board"], played["move"])
        self.algorithm.total(played, evaluated).backward()


def step(model: nn.Module, shard: dict, rank) -> None:
    Agent(model, ALGORITHM).update(shard)
