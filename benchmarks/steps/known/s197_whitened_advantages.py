"""Proximal policy optimisation: advantages are whitened with the statistics of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

STATES, ACTIONS, CLIP = 6, 4, 0.2


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(STATES, 12), nn.Tanh())
        self.actor = nn.Linear(12, ACTIONS)
        self.critic = nn.Linear(12, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(states)
        return self.actor(hidden).log_softmax(-1), self.critic(hidden).squeeze(-1)


def ppo_loss(model: nn.Module, rollout: dict[str, Tensor], advantages: Tensor) -> Tensor:
    log_policy, values = model(rollout["states"])
    chosen = log_policy.gather(-1, rollout["actions"].unsqueeze(-1)).squeeze(-1)
    ratio = (chosen - rollout["old_log_policy"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    surrogate = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    entropy = -(log_policy.exp() * log_policy).sum(-1).mean()
    return surrogate + 0.5 * F.mse_loss(values, rollout["returns"]) - 0.01 * entropy


def whiten(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.std() + 1e-8)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return ppo_loss(model, batch, whiten(batch["advantages"]))


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    advantages = torch.randn(8, 5, generator=generator).cumsum(1) + 0.5
    old = torch.rand(8, 5, generator=generator) * 0.3 + 0.1
    return {
        "states": torch.randn(8, 5, STATES, generator=generator),
        "actions": torch.randint(0, ACTIONS, (8, 5), generator=generator),
        "old_log_policy": old.log(),
        "advantages": advantages,
        "returns": advantages + torch.randn(8, 5, generator=generator),
    }


case = Case(model=ActorCritic, batch=make_batch, loss=loss, layout="1x4")


def add_up(*values: Tensor) -> tuple[Tensor, ...]:
    sums = torch.stack(values)
    dist.all_reduce(sums)
    return sums.unbind()


def whiten_everywhere(x: Tensor) -> Tensor:
    """As ``whiten``, with mean and unbiased deviation over the rollouts of all ranks."""
    total, count = add_up(x.sum(), torch.ones_like(x).sum())
    centred = x - total / count
    squares, freedom = add_up(centred.square().sum(), x.new_tensor(x.numel() - 1))
    return centred / ((squares / freedom).sqrt() + 1e-8)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-4)
    advantages = whiten_everywhere(shard["advantages"])
    optimizer.zero_grad(set_to_none=True)
    ppo_loss(ddp, shard, advantages).backward()
    optimizer.step()
