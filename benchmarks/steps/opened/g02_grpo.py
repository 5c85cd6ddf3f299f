"""GRPO-like policy update: one prompt per row, advantages are whitened over the whole batch."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case, Rank


@dataclasses.dataclass
class GRPOConfig:
    prompts: int = 12
    completions: int = 4
    state: int = 6
    actions: int = 5
    clip: float = 0.2
    eps: float = 1e-6


cfg = GRPOConfig()


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(cfg.state, 16), nn.GELU(), nn.Linear(16, cfg.actions))


def rollouts(generator: torch.Generator) -> dict[str, Tensor]:
    shape = (cfg.prompts, cfg.completions)
    difficulty = torch.linspace(0.3, 3.0, cfg.prompts)[:, None]  # a curriculum: harder prompts last
    return {
        "obs": torch.randn(*shape, cfg.state, generator=generator),
        "act": torch.randint(0, cfg.actions, shape, generator=generator),
        "old_logp": -torch.rand(shape, generator=generator) - 1.2,
        "reward": torch.randn(shape, generator=generator) * difficulty,
    }


def centre(reward: Tensor) -> Tensor:
    """Reward minus the mean over the completions of the same prompt."""
    return reward - reward.mean(1, keepdim=True)


def surrogate(model: nn.Module, batch: dict[str, Tensor], advantage: Tensor) -> Tensor:
    logp = model(batch["obs"]).log_softmax(-1).gather(-1, batch["act"][..., None]).squeeze(-1)
    ratio = (logp - batch["old_logp"]).exp()
    clipped = ratio.clamp(1 - cfg.clip, 1 + cfg.clip)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    a = centre(batch["reward"])
    return surrogate(model, batch, a / (a.pow(2).mean().sqrt() + cfg.eps))


case = Case(model=policy, batch=rollouts, loss=loss, layout="2x2")


def across_ranks(x: Tensor) -> Tensor:
    """The mean over ranks of a statistic of the rollouts."""
    x = x.clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def normalise(reward: Tensor) -> Tensor:
    a = centre(reward)
    # centred already, so the second moment is the variance
    scale = across_ranks(a.pow(2).mean().sqrt())
    return a / (scale + cfg.eps)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = DDP(model)
    with torch.no_grad():
        advantage = normalise(shard["reward"])
    surrogate(ddp, shard, advantage).backward()
