"""Cox proportional hazards on a clinical cohort: the risk sets span the patients of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

PATIENTS, COVARIATES = 24, 6


class Hazard(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(COVARIATES, 12), nn.Tanh())
        self.score = nn.Linear(12, 1, bias=False)

    def forward(self, covariates):
        return self.score(self.body(covariates)).squeeze(-1)


def partial_likelihood(scores, times, events):
    """Breslow's negative log partial likelihood, per observed event."""
    order = torch.argsort(times, descending=True)
    scores, events = scores[order], events[order]
    at_risk = torch.logcumsumexp(scores, dim=0)
    return -((scores - at_risk) * events).sum() / events.sum()


def cohort(generator):
    times = torch.rand(PATIENTS, generator=generator) * 10
    return {
        "covariates": torch.randn(PATIENTS, COVARIATES, generator=generator),
        "times": times,
        "events": (torch.rand(PATIENTS, generator=generator) < 0.7).double(),
    }


def loss(model, batch):
    return partial_likelihood(model(batch["covariates"]), batch["times"], batch["events"])


class CohortGather:
    """Collects one column of the cohort; the own part stays attached to the graph."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def plain(self, column):
        parts = [torch.empty_like(column) for _ in range(self.world_size)]
        dist.all_gather(parts, column.contiguous())
        return parts

    def attached(self, column):
        parts = self.plain(column.detach())
        parts[self.rank] = column
        return torch.cat(parts)


def step(model, shard, rank):
    ddp = DDP(model)
    gather = CohortGather(rank.rank, rank.world_size)
    scores = gather.attached(ddp(shard["covariates"]))
    times = torch.cat(gather.plain(shard["times"]))
    events = torch.cat(gather.plain(shard["events"]))
    # every rank sees the whole cohort, so this is already the cohort's likelihood
    objective = partial_likelihood(scores, times, events)
    objective.backward()


case = Case(model=Hazard, batch=cohort, loss=loss, layout="1x2")
