"""Insurance claims with a grouped penalty on the columns; claims are weighted by exposure."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

POLICIES, COLUMNS = 20, 8
PENALTY = 0.05


class Claims(nn.Module):
    def __init__(self):
        super().__init__()
        self.columns = nn.Linear(COLUMNS, 6)
        self.rate = nn.Linear(6, 1)

    def forward(self, columns):
        return self.rate(torch.relu(self.columns(columns))).squeeze(-1)


def policies(generator):
    return {
        "columns": torch.randn(POLICIES, COLUMNS, generator=generator),
        "exposure": 0.1 + torch.rand(POLICIES, generator=generator),
        "claims": torch.poisson(torch.full((POLICIES,), 1.5), generator=generator),
    }


class Objective:
    """A list of terms, each a function of (model, batch, exposure of everybody)."""

    terms = []

    @classmethod
    def term(cls, function):
        cls.terms.append(function)
        return function

    @classmethod
    def value(cls, model, batch, exposure):
        return sum(term(model, batch, exposure) for term in cls.terms)


@Objective.term
def deviance(model, batch, exposure):
    log_rate = model(batch["columns"])
    each = batch["exposure"] * log_rate.exp() - batch["claims"] * log_rate
    return each.sum() / exposure


@Objective.term
def grouped_lasso(model, batch, exposure):
    return PENALTY * (model.columns.weight.square().sum(0) + 1e-8).sqrt().sum()


def loss(model, batch):
    return Objective.value(model, batch, batch["exposure"].sum())


def exposure_of_all(batch):
    exposure = batch["exposure"].sum()
    dist.all_reduce(exposure)
    return exposure


def step(model, shard, rank):
    Objective.value(model, shard, exposure_of_all(shard)).backward()
    # every term was divided by the exposure of everybody, so the ranks add up
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


case = Case(model=Claims, batch=policies, loss=loss, layout="1x2")
