"""One epoch of PPO: the clipped policy loss and a value loss, on rollouts of all ranks.

Advantages are whitened with the moments of the rollouts of all ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLIP = 0.2
VALUE_COEFFICIENT = 0.5

Rollout = dict[str, Tensor]


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 10), nn.Tanh())
        self.policy = nn.Linear(10, 3)
        self.value = nn.Linear(10, 1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(observations)
        return self.policy(features).log_softmax(-1), self.value(features).squeeze(-1)


def ppo_loss(model: nn.Module, rollout: Rollout, advantages: Tensor) -> Tensor:
    log_probs, values = model(rollout["observations"])
    chosen = log_probs.gather(1, rollout["actions"].unsqueeze(1)).squeeze(1)
    ratio = (chosen - rollout["old_log_probs"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    return policy_loss + VALUE_COEFFICIENT * (values - rollout["returns"]).square().mean()


def loss(model: nn.Module, rollout: Rollout) -> Tensor:
    advantages = rollout["advantages"]
    deviation = advantages.std(correction=0) + 1e-8
    return ppo_loss(model, rollout, (advantages - advantages.mean()) / deviation)


def make_batch(generator: torch.Generator) -> Rollout:
    return {
        "observations": torch.randn(24, 5, generator=generator),
        "actions": torch.randint(3, (24,), generator=generator),
        "old_log_probs": -1.1 + 0.1 * torch.randn(24, generator=generator),
        "advantages": 1.5 + torch.randn(24, generator=generator).cumsum(0),
        "returns": torch.randn(24, generator=generator),
    }


case = Case(model=ActorCritic, batch=make_batch, loss=loss, layout="1x4")


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over all ranks."""
    count = torch.tensor(float(len(values)), dtype=values.dtype, device=values.device)
    sums = torch.stack([count, values.sum(), values.square().sum()])
    dist.all_reduce(sums)
    mean = sums[1] / sums[0]
    variance = sums[2] / sums[0] - mean.square()
    return mean, variance.clamp(min=0).sqrt()


def whiten(advantages: Tensor, shift_mean: bool = True) -> Tensor:
    mean, deviation = moments(advantages)
    whitened = (advantages - advantages.mean()) / (deviation + 1e-8)
    return whitened if shift_mean else whitened + mean


def step(model: nn.Module, shard: Rollout, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-4, eps=1e-5)
    optimizer.zero_grad()
    ppo_loss(ddp, shard, whiten(shard["advantages"])).backward()
    optimizer.step()
