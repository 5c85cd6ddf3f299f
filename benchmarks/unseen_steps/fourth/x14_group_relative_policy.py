"""GRPO: completions of one prompt are spread over the ranks of a node."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCAB, WIDTH, LENGTH = 13, 10, 6
PROMPTS, COMPLETIONS = 2, 8


@dataclass(frozen=True)
class GRPOConfig:
    group_size: int = COMPLETIONS
    clip: float = 0.2
    kl_coefficient: float = 0.05


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """The log-probability of every token but the first."""
        hidden, _ = self.memory(self.embed(tokens[:, :-1]))
        log_probs = self.head(hidden).log_softmax(dim=-1)
        return log_probs.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    groups = rewards.view(-1, group_size)
    centered = groups - groups.mean(dim=1, keepdim=True)
    return (centered / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()


def policy_loss(
    log_probs: Tensor, batch: dict[str, Tensor], advantages: Tensor, config: GRPOConfig
) -> Tensor:
    ratio = (log_probs - batch["old_log_probs"]).exp()
    clipped = ratio.clamp(1.0 - config.clip, 1.0 + config.clip)
    gain = torch.minimum(ratio * advantages.unsqueeze(1), clipped * advantages.unsqueeze(1))
    difference = batch["reference_log_probs"] - log_probs
    penalty = difference.exp() - difference - 1.0
    return (config.kl_coefficient * penalty - gain).mean()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    config = GRPOConfig()
    advantages = group_advantages(batch["rewards"], config.group_size)
    return policy_loss(model(batch["tokens"]), batch, advantages, config)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    count = PROMPTS * COMPLETIONS
    typical = -torch.tensor(float(VOCAB)).log()
    noise = torch.randn(2, count, LENGTH - 1, generator=generator)
    return {
        "tokens": torch.randint(VOCAB, (count, LENGTH), generator=generator),
        "rewards": torch.rand(count, generator=generator),
        "old_log_probs": typical + 0.3 * noise[0],
        "reference_log_probs": typical + 0.3 * noise[1],
    }


class GRPOTrainer:
    def __init__(self, policy: nn.Module, config: GRPOConfig, rank) -> None:
        self.ddp = DistributedDataParallel(policy)
        self.config = config
        self.rank = rank

    def gather(self, values: Tensor) -> Tensor:
        everyone = [torch.empty_like(values) for _ in range(self.rank.world_size)]
        dist.all_gather(everyone, values.contiguous())
        return torch.cat(everyone)

    def compute_advantages(self, rewards: Tensor) -> Tensor:
        """Normalizes rewards within the group of their prompt, on whichever ranks it is."""
        advantages = group_advantages(self.gather(rewards), self.config.group_size)
        process_slice = slice(
            self.rank.local_rank * len(rewards),
            (self.rank.local_rank + 1) * len(rewards),
        )
        return advantages[process_slice]

    def training_step(self, batch: dict[str, Tensor]) -> None:
        with torch.no_grad():
            advantages = self.compute_advantages(batch["rewards"])
        policy_loss(self.ddp(batch["tokens"]), batch, advantages, self.config).backward()


case = Case(model=Policy, batch=make_batch, loss=loss, layout="2x2")


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    GRPOTrainer(model, GRPOConfig(), rank).training_step(shard)
