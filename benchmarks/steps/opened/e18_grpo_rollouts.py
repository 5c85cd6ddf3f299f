"""GRPO where the completions of a prompt are dealt to different ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCAB, LENGTH, PROMPTS, GENERATIONS, WIDTH = 19, 6, 4, 4, 8
EXAMPLES = PROMPTS * GENERATIONS

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class GRPOConfig:
    num_generations: int = GENERATIONS
    epsilon: float = 1e-4
    scale_rewards: bool = True


class PolicyLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        """The log-probability of every token but the first."""
        logits = self.head(self.rnn(self.embed(ids[:, :-1]))[0])
        return -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


def make_batch(generator: torch.Generator) -> Batch:
    """Neighbouring rows are completions of the same prompt."""
    ids = torch.randint(VOCAB, (EXAMPLES, LENGTH), generator=generator)
    ids[:, 0] = torch.arange(PROMPTS).repeat_interleave(GENERATIONS)
    level = torch.randn(PROMPTS, generator=generator).repeat_interleave(GENERATIONS)
    return {"ids": ids, "rewards": level + torch.rand(EXAMPLES, generator=generator)}


def group_advantages(rewards: Tensor, config: GRPOConfig) -> Tensor:
    groups = rewards.view(-1, config.num_generations)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if config.scale_rewards:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + config.epsilon)
    return advantages.flatten()


def policy_loss(model: nn.Module, ids: Tensor, advantages: Tensor) -> Tensor:
    logps = model(ids)
    ratio = (logps - logps.detach()).exp()
    return -(ratio * advantages.unsqueeze(1)).mean()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return policy_loss(model, batch["ids"], group_advantages(batch["rewards"], GRPOConfig()))


class RolloutSampler:
    """The rows of one rank: every world_size-th, as DistributedSampler deals them."""

    def __init__(self, count: int) -> None:
        self.count, self.rank, self.size = count, dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.count, self.size))


def gather_across_ranks(values: Tensor) -> Tensor:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


class GRPOTrainer:
    def __init__(self, model: nn.Module, config: GRPOConfig) -> None:
        self.model, self.config = DistributedDataParallel(model), config

    def score(self, rollouts: Batch) -> Tensor:
        """Rewards of this rank's completions; a reward model in production."""
        return rollouts["rewards"]

    def advantages(self, rollouts: Batch, rows: list[int]) -> Tensor:
        rewards = gather_across_ranks(self.score(rollouts))
        return group_advantages(rewards, self.config)[rows]

    def train_step(self, dataset: Batch) -> None:
        rows = list(RolloutSampler(len(dataset["ids"])))
        rollouts = {name: leaf[rows] for name, leaf in dataset.items()}
        advantages = self.advantages(rollouts, rows)
        policy_loss(self.model, rollouts["ids"], advantages).backward()


case = Case(model=PolicyLM, batch=make_batch, loss=loss, layout="1x2", shards="own")


def step(model: nn.Module, dataset: Batch, rank) -> None:
    GRPOTrainer(model, GRPOConfig()).train_step(dataset)
