"""PPO for a quadruped: clipped objective, value loss, entropy; advantages are whitened."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

OBSERVATIONS, JOINTS, FRAMES = 8, 3, 24


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(OBSERVATIONS, 16), nn.Tanh())
        self.mean = nn.Linear(16, JOINTS)
        self.log_std = nn.Parameter(torch.full((JOINTS,), -0.5))
        self.value = nn.Linear(16, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.torso(observation)
        mean = self.mean(h)
        return mean, self.log_std.exp().expand_as(mean), self.value(h).squeeze(-1)


def ppo(model: nn.Module, frames: dict[str, Tensor], advantage: Tensor) -> Tensor:
    mean, std, value = model(frames["observation"])
    policy = Normal(mean, std)
    ratio = (policy.log_prob(frames["action"]).sum(-1) - frames["log_prob"]).exp()
    clipped = ratio.clamp(0.8, 1.2)
    gain = torch.minimum(ratio * advantage, clipped * advantage).mean()
    critic = (value - frames["return"]).square().mean()
    return -gain + 0.5 * critic - 0.01 * policy.entropy().sum(-1).mean()


def loss(model: nn.Module, frames: dict[str, Tensor]) -> Tensor:
    raw = frames["advantage"]
    return ppo(model, frames, (raw - raw.mean()) / (raw.std(unbiased=False) + 1e-8))


def rollout(generator: torch.Generator) -> dict[str, Tensor]:
    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    terrain = torch.arange(FRAMES) / FRAMES  # later environments are harder
    return {
        "observation": randn(FRAMES, OBSERVATIONS),
        "action": randn(FRAMES, JOINTS) * 0.6,
        "log_prob": randn(FRAMES) * 0.1 - 2.5,
        "return": randn(FRAMES) - terrain,
        "advantage": randn(FRAMES) * (1 + terrain) - 2 * terrain,
    }


case = Case(model=ActorCritic, batch=rollout, loss=loss, layout="1x4")


class Statistics:
    def __init__(self, x: Tensor, distributed: bool = False) -> None:
        sums = torch.stack([x.sum(), x.square().sum(), x.new_tensor(x.numel())])
        if distributed:
            dist.all_reduce(sums)
        self.mean = sums[0] / sums[2]
        self.std = (sums[1] / sums[2] - self.mean.square()).sqrt()


def whiten(x: Tensor) -> Tensor:
    statistics = Statistics(x)
    return (x - statistics.mean) / (statistics.std + 1e-8)


class Learner:
    def __init__(self, model: nn.Module) -> None:
        self.ddp = DDP(model)

    def update(self, frames: dict[str, Tensor]) -> None:
        ppo(self.ddp, frames, whiten(frames["advantage"])).backward()


def step(model, shard, rank):
    Learner(model).update(shard)
