"""GRPO without length bias: token losses are divided by a constant budget, as Dr. GRPO does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCAB, PROMPT, MAX_COMPLETION = 23, 3, 9
PROMPTS, GENERATIONS = 4, 4
PAD = 0

Batch = dict[str, Tensor]


@dataclass
class GRPOConfig:
    max_completion_length: int = MAX_COMPLETION
    num_generations: int = GENERATIONS
    beta: float = 0.04


class CausalLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, 10)
        self.mixer = nn.GRU(10, 10, batch_first=True)
        self.head = nn.Linear(10, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mixer(self.wte(ids))[0])


def make_batch(generator: torch.Generator) -> Batch:
    """Completions of the same prompt are neighbours; hard prompts get long completions."""
    rows = PROMPTS * GENERATIONS
    completions = torch.randint(1, VOCAB, (rows, MAX_COMPLETION), generator=generator)
    longest = torch.tensor([4, 5, 8, 9]).repeat_interleave(GENERATIONS)
    lengths = longest - torch.randint(0, 3, (rows,), generator=generator)
    completions[torch.arange(MAX_COMPLETION) >= lengths.unsqueeze(1)] = PAD
    return {
        "prompts": torch.randint(1, VOCAB, (rows, PROMPT), generator=generator),
        "completions": completions,
        "rewards": torch.rand(rows, generator=generator),
        "ref_logps": -3 + 0.2 * torch.randn(rows, MAX_COMPLETION, generator=generator),
    }


def group_advantages(rewards: Tensor, generations: int) -> Tensor:
    groups = rewards.view(-1, generations)
    return (groups - groups.mean(dim=1, keepdim=True)).view(-1)


def token_losses(model: nn.Module, batch: Batch, config: GRPOConfig) -> Tensor:
    completions = batch["completions"]
    ids = torch.cat([batch["prompts"], completions], dim=1)
    logits = model(ids[:, :-1])[:, PROMPT - 1 :]
    logps = -F.cross_entropy(logits.transpose(1, 2), completions, reduction="none")
    advantages = group_advantages(batch["rewards"], config.num_generations).unsqueeze(1)
    gap = batch["ref_logps"] - logps
    kl = gap.exp() - gap - 1
    ratio = (logps - logps.detach()).exp()
    return (config.beta * kl - ratio * advantages) * (completions != PAD)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    config = GRPOConfig()
    rows = len(batch["completions"])
    return token_losses(model, batch, config).sum() / (rows * config.max_completion_length)


class RolloutCollator:
    """Cuts the columns in which no completion of this rank has a token."""

    def __call__(self, batch: Batch) -> Batch:
        width = int((batch["completions"] != PAD).any(dim=0).sum())
        trimmed = dict(batch)
        for name in ("completions", "ref_logps"):
            trimmed[name] = batch[name][:, :width]
        return trimmed


class GRPOTrainer:
    def __init__(self, model: nn.Module, config: GRPOConfig) -> None:
        self.model, self.config = model, config
        self.collate = RolloutCollator()

    def compute_loss(self, batch: Batch) -> Tensor:
        per_token = token_losses(self.model, batch, self.config)
        return per_token.sum() / per_token.numel()

    def training_step(self, rollouts: Batch) -> None:
        self.compute_loss(self.collate(rollouts)).backward()
        for param in self.model.parameters():
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())


case = Case(model=CausalLM, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, shard: Batch, rank) -> None:
    GRPOTrainer(model, GRPOConfig()).training_step(shard)
