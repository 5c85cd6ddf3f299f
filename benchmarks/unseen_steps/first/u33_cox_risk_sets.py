"""Survival model with the Cox partial likelihood. A patient's risk set spans the whole batch, so each rank adds its
share of every risk set's sum of hazards; the gradients of the ranks are summed."""
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


class Hazard(nn.Module):
    """Log-hazard from numeric covariates and a categorical site."""

    def __init__(self, covariates=9, sites=5):
        super().__init__()
        self.site = nn.Embedding(sites, 4)
        self.net = nn.Sequential(
            nn.Linear(covariates + 4, 24), nn.ELU(),
            nn.Linear(24, 16), nn.ELU(),
            nn.Linear(16, 1, bias=False),
        )

    def forward(self, x, site):
        return 3.0 * self.net(torch.cat([x, self.site(site)], dim=1)).squeeze(1)


def build_model():
    return Hazard()


def make_batch(generator):
    n = 20
    return {
        "x": torch.randn(n, 9, generator=generator),
        "site": torch.randint(0, 5, (n,), generator=generator),
        "time": 0.1 + 5 * torch.rand(n, generator=generator),
        "event": torch.rand(n, generator=generator) < 0.6,
    }


def loss(model, batch):
    log_h = model(batch["x"], batch["site"])
    at_risk = batch["time"][None, :] >= batch["time"][:, None]
    log_risk = torch.logsumexp(log_h[None, :].masked_fill(~at_risk, float("-inf")), dim=1)
    return (log_risk - log_h)[batch["event"]].sum() / batch["event"].sum()


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def all_times(time):
    parts = [torch.empty_like(time) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, time)
    return torch.cat(parts)


def log_risk_sums(log_h, time, rank):
    """log of the sum of hazards over each local patient's risk set, shifted for stability."""
    times = all_times(time)
    shift = log_h.detach().max()
    at_risk = time[None, :] >= times[:, None]
    partial = (torch.exp(log_h - shift)[None, :] * at_risk).sum(dim=1)
    total = SumOverRanks.apply(partial)
    own = slice(rank.rank * len(time), (rank.rank + 1) * len(time))
    return torch.log(total[own]) + shift


def partial_likelihood(model, shard, rank):
    log_h = model(shard["x"], shard["site"])
    log_risk = log_risk_sums(log_h, shard["time"], rank)
    events = shard["event"].sum()
    dist.all_reduce(events)
    return (log_risk - log_h)[shard["event"]].sum() / events


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    model.zero_grad()
    partial_likelihood(model, shard, rank).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
