"""Cox regression on follow-up of patients. The risk set of an event is everyone still observed."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


class Hazard(nn.Module):
    def __init__(self):
        super().__init__()
        self.markers = nn.Linear(6, 8)
        self.log_hazard = nn.Linear(8, 1, bias=False)

    def forward(self, patients):
        return self.log_hazard(torch.tanh(self.markers(patients))).squeeze(-1)


def cohort(generator):
    return {
        "patients": torch.randn(18, 6, generator=generator),
        "months": torch.rand(18, generator=generator) * 60,
        "died": (torch.rand(18, generator=generator) < 0.6).float(),
    }


def negative_partial_likelihood(risk, months, died, all_risk, all_months):
    at_risk = all_months.unsqueeze(0) >= months.unsqueeze(1)
    scores = all_risk.unsqueeze(0).masked_fill(~at_risk, float("-inf"))
    return ((scores.logsumexp(1) - risk) * died).sum()


def loss(model, batch):
    risk, months = model(batch["patients"]), batch["months"]
    summed = negative_partial_likelihood(risk, months, batch["died"], risk, months)
    return summed / batch["died"].sum()


class AllPatients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, rank, world_size):
        ctx.here = rank, world_size
        parts = [torch.empty_like(values) for _ in range(world_size)]
        dist.all_gather(parts, values)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        rank, world_size = ctx.here
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad.chunk(world_size)[rank], None, None


class DistributedCox:
    def __init__(self, model, rank):
        self.model, self.rank, self.world_size = model, int(rank), rank.world_size

    def everyone(self, values):
        return AllPatients.apply(values.contiguous(), self.rank, self.world_size)

    def fit(self, shard):
        risk, months, died = self.model(shard["patients"]), shard["months"], shard["died"]
        all_risk, all_months = self.everyone(risk), self.everyone(months)
        events = died.sum()
        dist.all_reduce(events)
        summed = negative_partial_likelihood(risk, months, died, all_risk, all_months)
        (summed / events).backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self.world_size)


def step(model, shard, rank):
    DistributedCox(model, rank).fit(shard)


case = Case(model=Hazard, batch=cohort, loss=loss, layout="1x3")
