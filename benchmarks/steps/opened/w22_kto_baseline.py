"""Kahneman-Tversky optimisation of a small language model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCABULARY, LENGTH, EXAMPLES = 11, 6, 16
BETA, DESIRABLE_WEIGHT, UNDESIRABLE_WEIGHT = 0.3, 1.0, 1.3


class Policy(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.mixer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Log-probability of each sequence, given its first token."""
        hidden, _ = self.mixer(self.tokens(ids[:, :-1]))
        logps = self.head(hidden).log_softmax(-1)
        return logps.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1).sum(-1)


def average_over_ranks(value: Tensor) -> Tensor:
    if not (dist.is_available() and dist.is_initialized()):
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def kl_baseline(policy: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The reference point z0: divergence on mismatched prompts and completions, never negative."""
    with torch.no_grad():
        logps = policy(batch["mismatched_ids"])
    kl = (logps - batch["reference_mismatched_logps"]).mean().clamp(min=0)
    return average_over_ranks(kl)


def kto_loss(policy: nn.Module, batch: dict[str, Tensor], baseline_policy=None) -> Tensor:
    baseline = kl_baseline(baseline_policy or policy, batch)
    rewards = policy(batch["ids"]) - batch["reference_logps"]
    desirable = 1 - torch.sigmoid(BETA * (rewards - baseline))
    undesirable = 1 - torch.sigmoid(BETA * (baseline - rewards))
    losses = torch.where(
        batch["desirable"],
        DESIRABLE_WEIGHT * desirable,
        UNDESIRABLE_WEIGHT * undesirable,
    )
    return losses.mean()


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    usual = -2.4 * (LENGTH - 1)

    def logps() -> Tensor:
        return usual + 1.5 * torch.randn(EXAMPLES, generator=generator)

    drift = torch.linspace(-3.0, 2.0, EXAMPLES)
    return {
        "ids": torch.randint(VOCABULARY, (EXAMPLES, LENGTH), generator=generator),
        "mismatched_ids": torch.randint(VOCABULARY, (EXAMPLES, LENGTH), generator=generator),
        "reference_logps": logps(),
        "reference_mismatched_logps": logps() + drift,
        "desirable": torch.rand(EXAMPLES, generator=generator) < 0.6,
    }


class KTOTrainer:
    def __init__(self, policy: Policy) -> None:
        self.raw = policy
        self.policy = DistributedDataParallel(policy)

    def training_step(self, batch: dict[str, Tensor]) -> float:
        self.raw.zero_grad()
        loss = kto_loss(self.policy, batch, baseline_policy=self.raw)
        loss.backward()
        return loss.item()


case = Case(model=Policy, batch=make_batch, loss=kto_loss, layout="2x2")


def step(model, shard, rank):
    KTOTrainer(model).training_step(shard)
