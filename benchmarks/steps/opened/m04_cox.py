"""Cox proportional hazards: the risk sets span the patients of all hospitals (ranks)."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


class Hazard(nn.Module):
    def __init__(self, covariates=7):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(covariates, 10), nn.SiLU(), nn.Linear(10, 1, bias=False))

    def forward(self, x):
        return self.body(x).squeeze(-1)


def patients(generator):
    return {
        "covariates": torch.randn(20, 7, generator=generator),
        "time": torch.rand(20, generator=generator) * 10,
        "event": (torch.rand(20, generator=generator) < 0.6).long(),
    }


def partial_likelihood(risk, event):
    """Negative log partial likelihood of patients sorted from the longest time to the shortest."""
    at_risk = torch.logcumsumexp(risk, dim=0)
    return ((at_risk - risk) * event).sum() / event.sum()


def loss(model, batch):
    order = batch["time"].argsort(descending=True)
    return partial_likelihood(model(batch["covariates"])[order], batch["event"][order])


class GatherRisk(torch.autograd.Function):
    """Concatenates over the ranks. All ranks compute the same loss, so each takes its own slice back."""

    @staticmethod
    def forward(ctx, mine):
        ctx.rank, ctx.count = dist.get_rank(), len(mine)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.rank * ctx.count : (ctx.rank + 1) * ctx.count]


def gather(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def step(model, shard, rank):
    risk = GatherRisk.apply(model(shard["covariates"]))
    time, event = gather(shard["time"]), gather(shard["event"])
    order = time.argsort(descending=True)
    partial_likelihood(risk[order], event).backward()
    # every rank holds the derivative through its own patients: they add up
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


case = Case(model=Hazard, batch=patients, loss=loss)
