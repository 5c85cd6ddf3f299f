"""Time to relapse after surgery: a Cox model whose risk sets span all hospitals' patients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

PATIENTS, MARKERS = 24, 9


class HazardNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(MARKERS, 12), nn.ELU(), nn.Linear(12, 6), nn.Tanh())
        self.log_hazard = nn.Linear(6, 1, bias=False)

    def forward(self, markers):
        return self.log_hazard(self.body(markers)).squeeze(-1)


def build_model():
    return HazardNet()


def make_batch(generator):
    months = torch.rand(PATIENTS, generator=generator) * 60 + 1
    relapsed = (torch.rand(PATIENTS, generator=generator) < 0.6).double()
    relapsed[0] = 1.0
    return {
        "markers": torch.randn(PATIENTS, MARKERS, generator=generator),
        "months": months,
        "relapsed": relapsed,
    }


def partial_likelihood(log_hazard, relapsed):
    """Both arguments by descending follow-up time, so the risk set is a prefix."""
    at_risk = torch.logcumsumexp(log_hazard, dim=0)
    return -((log_hazard - at_risk) * relapsed).sum() / relapsed.sum()


def loss(model, batch):
    order = torch.argsort(batch["months"], descending=True)
    return partial_likelihood(model(batch["markers"])[order], batch["relapsed"][order])


def gather(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.detach().contiguous())
    return parts


def gather_keeping_own(tensor, rank):
    """The other ranks' rows are constants, our own keep their graph."""
    parts = gather(tensor)
    parts[rank.rank] = tensor
    return torch.cat(parts)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    log_hazard = gather_keeping_own(ddp(shard["markers"]), rank)
    months = torch.cat(gather(shard["months"]))
    relapsed = torch.cat(gather(shard["relapsed"]))

    # longest follow-up first
    order = torch.argsort(months, descending=True)
    log_hazard = log_hazard[order]

    # each rank holds the derivative by its own patients; DDP takes the mean of these
    value = partial_likelihood(log_hazard, relapsed)
    (value * rank.world_size).backward()


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")
