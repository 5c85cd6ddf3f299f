"""Survival analysis: the Cox partial likelihood, whose risk sets reach over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case

COVARIATES = 9


class RiskNet(nn.Module):
    def __init__(self, hidden: int = 12):
        super().__init__()
        self.norm = nn.LayerNorm(COVARIATES)
        self.hidden = nn.Linear(COVARIATES, hidden)
        self.out = nn.Linear(hidden, 1, bias=False)

    def forward(self, covariates: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(self.norm(covariates)))).squeeze(-1)


def partial_likelihood(scores: Tensor, times: Tensor, observed: Tensor) -> Tensor:
    """Negative and per event. At the time of an event, all that live longer are at risk."""
    latest_first = torch.argsort(times, descending=True)
    scores, observed = scores[latest_first], observed[latest_first]
    at_risk = torch.logcumsumexp(scores, dim=0)
    return -((scores - at_risk) * observed).sum() / observed.sum()


def loss(model: nn.Module, batch: dict) -> Tensor:
    return partial_likelihood(model(batch["covariates"]), batch["time"], batch["observed"])


class Cohort:
    """The patients of all ranks, as every rank sees them.

    Times and censoring are plain data. Of the scores, only the rank's own carry a gradient: the
    sum of the ranks' gradients is then that of the whole likelihood.
    """

    def __init__(self, rank):
        self.rank = rank

    def everyone(self, own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(self.rank.world_size)]
        dist.all_gather(parts, own.contiguous())
        return parts

    def data(self, own: Tensor) -> Tensor:
        return torch.cat(self.everyone(own))

    def scores(self, own: Tensor) -> Tensor:
        parts = self.everyone(own.detach())
        parts[self.rank.local_rank] = own
        return torch.cat(parts)


def patients(generator: torch.Generator) -> dict:
    count = 24
    return {
        "covariates": torch.randn(count, COVARIATES, generator=generator),
        "time": torch.rand(count, generator=generator) * 10,
        "observed": (torch.rand(count, generator=generator) < 0.7).float(),
    }


case = Case(model=RiskNet, batch=patients, loss=loss, layout="2x2")


def step(model: nn.Module, shard: dict, rank) -> None:
    cohort = Cohort(rank)
    scores = cohort.scores(model(shard["covariates"]))
    times, observed = cohort.data(shard["time"]), cohort.data(shard["observed"])
    partial_likelihood(scores, times, observed).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
