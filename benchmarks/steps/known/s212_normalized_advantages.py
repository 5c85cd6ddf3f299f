"""A clipped policy update. Advantages are normalized over the rollouts of all ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.2, 0.5, 0.01


@dataclass
class Rollout:
    state: Tensor
    action: Tensor
    log_prob: Tensor
    advantage: Tensor
    value: Tensor


class ActorCritic(nn.Module):
    def __init__(self, actions: int = 4, width: int = 10) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(6, width), nn.Tanh())
        self.actor = nn.Linear(width, actions)
        self.critic = nn.Linear(width, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.shared(state)
        return self.actor(hidden).log_softmax(-1), self.critic(hidden)[:, 0]


def policy_loss(model: nn.Module, rollout: Rollout, advantage: Tensor) -> Tensor:
    log_probs, value = model(rollout.state)
    taken = log_probs.gather(1, rollout.action[:, None])[:, 0]
    ratio = (taken - rollout.log_prob).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage).mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    returns = rollout.value + rollout.advantage
    return VALUE_WEIGHT * F.mse_loss(value, returns) - surrogate - ENTROPY_WEIGHT * entropy


def loss(model: nn.Module, rollout: Rollout) -> Tensor:
    advantage = rollout.advantage
    centred = advantage - advantage.mean()
    normalized = centred / (advantage.std(correction=0) + 1e-8)
    return policy_loss(model, rollout, normalized)


def make_batch(generator: torch.Generator) -> Rollout:
    reward = torch.linspace(-1.5, 2.0, 16)
    return Rollout(
        state=torch.randn(16, 6, generator=generator),
        action=torch.randint(4, (16,), generator=generator),
        log_prob=-1.4 + 0.2 * torch.randn(16, generator=generator),
        advantage=reward + torch.randn(16, generator=generator),
        value=torch.randn(16, generator=generator),
    )


case = Case(model=ActorCritic, batch=make_batch, loss=loss, layout="1x4")


def mean_over_ranks(value: Tensor) -> Tensor:
    total = value.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def normalized(advantage: Tensor) -> Tensor:
    """Every rank has equally many transitions, so means over ranks are means over transitions."""
    mean = mean_over_ranks(advantage.mean())
    variance = mean_over_ranks(advantage.var(correction=0))
    return (advantage - mean) / (variance.sqrt() + 1e-8)


def step(model: nn.Module, shard: Rollout, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-4)
    optimizer.zero_grad()
    policy_loss(ddp, shard, normalized(shard.advantage)).backward()
    optimizer.step()
