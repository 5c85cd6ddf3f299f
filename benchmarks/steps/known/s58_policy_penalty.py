"""Policy optimisation with a penalty for leaving the old policy, whose weight adapts."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

ACTIONS = 3
TARGET = 0.3
START_WEIGHT = 0.8


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.logits = nn.Linear(8, ACTIONS)

    def log_probability(self, batch):
        log_probabilities = (0.1 * self.logits(self.body(batch["state"]))).log_softmax(dim=1)
        return log_probabilities.gather(1, batch["action"][:, None]).squeeze(1)


def penalty_weight(drift):
    """A stronger penalty where the policy has gone too far, and a weaker one where it stays."""
    if drift > 1.5 * TARGET:
        return 2 * START_WEIGHT
    if drift < TARGET / 1.5:
        return START_WEIGHT / 2
    return START_WEIGHT


def objective(log_probability, batch, drift):
    change = log_probability - batch["old_log_probability"]
    surrogate = (change.exp() * batch["advantage"]).mean()
    return penalty_weight(drift) * 0.5 * change.square().mean() - surrogate


def mean_drift(log_probability, batch):
    return (batch["old_log_probability"] - log_probability.detach()).mean()


def loss(model, batch):
    log_probability = model.log_probability(batch)
    return objective(log_probability, batch, mean_drift(log_probability, batch))


def make_batch(generator):
    return {
        "state": torch.randn(12, 5, generator=generator),
        "action": torch.randint(0, ACTIONS, (12,), generator=generator),
        "advantage": torch.randn(12, generator=generator),
        "old_log_probability": 0.05 * torch.randn(12, generator=generator) - 0.8,
    }


case = Case(model=Policy, batch=make_batch, loss=loss, layout="1x2")


def agreed_drift(drift):
    """All ranks must choose the same weight."""
    drift = drift.clone()
    dist.all_reduce(drift)
    return drift


def step(model, shard, rank):
    model.zero_grad()
    log_probability = model.log_probability(shard)
    drift = agreed_drift(mean_drift(log_probability, shard))
    objective(log_probability, shard, drift).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= rank.world_size
