"""PPO on token-level advantages of a small language model policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCAB, LENGTH, ROLLOUTS = 17, 7, 16

Batch = dict[str, Tensor]


@dataclass
class PPOConfig:
    clip_range: float = 0.2
    entropy_coef: float = 0.01
    whiten_eps: float = 1e-8


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.rnn = nn.GRU(12, 12, batch_first=True)
        self.lm_head = nn.Linear(12, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.rnn(self.embed(tokens))
        return self.lm_head(states).log_softmax(dim=-1)


def make_rollouts(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCAB, (ROLLOUTS, LENGTH + 1), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (ROLLOUTS, 1), generator=generator)
    noise = torch.randn(ROLLOUTS, LENGTH, generator=generator)
    # Easier prompts come first in the rollout buffer and earn more.
    difficulty = torch.linspace(1.5, -1.5, ROLLOUTS).unsqueeze(1)
    return {
        "tokens": tokens,
        "mask": (torch.arange(LENGTH) < lengths).double(),
        "old_logprobs": -2.8 + 0.1 * torch.randn(ROLLOUTS, LENGTH, generator=generator),
        "advantages": noise + difficulty,
    }


def objective(model: nn.Module, batch: Batch, advantages: Tensor, config: PPOConfig) -> Tensor:
    """Clipped surrogate with an entropy bonus, one value for each token."""
    logprobs = model(batch["tokens"][:, :-1])
    chosen = logprobs.gather(-1, batch["tokens"][:, 1:].unsqueeze(-1)).squeeze(-1)
    ratio = (chosen - batch["old_logprobs"]).exp()
    clipped = ratio.clamp(1 - config.clip_range, 1 + config.clip_range)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return -(surrogate + config.entropy_coef * entropy) * batch["mask"]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    config, mask = PPOConfig(), batch["mask"]
    count = mask.sum()
    mean = (batch["advantages"] * mask).sum() / count
    variance = ((batch["advantages"] - mean).square() * mask).sum() / count
    advantages = (batch["advantages"] - mean) * torch.rsqrt(variance + config.whiten_eps)
    return objective(model, batch, advantages, config).sum() / count


def masked_mean_across_ranks(values: Tensor, mask: Tensor) -> Tensor:
    totals = torch.stack([(values * mask).sum(), mask.sum()])
    dist.all_reduce(totals)
    return totals[0] / totals[1]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


def whiten_across_ranks(values: Tensor, mask: Tensor, eps: float) -> Tensor:
    mean = masked_mean_across_ranks(values, mask)
    centered = values - masked_mean(values, mask)
    variance = masked_mean_across_ranks(centered.square(), mask)
    return (values - mean) * torch.rsqrt(variance + eps)


class PPOTrainer:
    def __init__(self, policy: nn.Module, config: PPOConfig) -> None:
        self.policy = DistributedDataParallel(policy)
        self.config = config

    def update(self, batch: Batch) -> None:
        mask = batch["mask"]
        advantages = whiten_across_ranks(batch["advantages"], mask, self.config.whiten_eps)
        per_token = objective(self.policy, batch, advantages, self.config)
        tokens = mask.sum()
        dist.all_reduce(tokens)
        (per_token.sum() * dist.get_world_size() / tokens).backward()


case = Case(model=Policy, batch=make_rollouts, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank) -> None:
    PPOTrainer(model, PPOConfig()).update(shard)
