"""Policy gradients: every trajectory has its own baseline, its mean reward-to-go."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Categorical

from ddp_equivalence import Case, Rank

STEPS, ACTIONS = 6, 3


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 9), nn.Tanh())
        self.head = nn.Linear(9, ACTIONS)

    def forward(self, observations: Tensor) -> Tensor:
        return self.head(self.body(observations))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    to_go = batch["rewards"].flip(1).cumsum(1).flip(1)
    centred = torch.stack([row - row.mean() for row in to_go])
    logp = Categorical(logits=model(batch["observations"])).log_prob(batch["actions"])
    return -(logp * centred).mean()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "observations": torch.randn(12, STEPS, 4, generator=generator),
        "actions": torch.randint(0, ACTIONS, (12, STEPS), generator=generator),
        "rewards": torch.randn(12, STEPS, generator=generator),
    }


case = Case(model=Policy, batch=make_batch, loss=loss, layout="1x2")


@dataclass
class Rollout:
    """Trajectories of equal length, one in each row."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor

    @property
    def returns(self) -> Tensor:
        return self.rewards.flip(1).cumsum(1).flip(1)

    @property
    def advantages(self) -> Tensor:
        returns = self.returns
        return returns - returns.mean(dim=0, keepdim=True)


def surrogate(policy: nn.Module, rollout: Rollout) -> Tensor:
    distribution = Categorical(logits=policy(rollout.observations))
    return -(distribution.log_prob(rollout.actions) * rollout.advantages).mean()


def average_gradients(policy: nn.Module) -> None:
    world_size = dist.get_world_size()
    for parameter in policy.parameters():
        parameter.grad /= world_size
        dist.all_reduce(parameter.grad)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    rollout = Rollout(**shard)
    model.zero_grad()
    surrogate(model, rollout).backward()
    average_gradients(model)
