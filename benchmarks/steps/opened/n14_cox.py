"""Survival after surgery: Cox's partial likelihood needs the patients at risk on all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

PATIENTS, MARKERS = 20, 9


class Hazard(nn.Module):
    def __init__(self, hidden=12):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(MARKERS, hidden), nn.SELU(), nn.Linear(hidden, 1, bias=False))

    def forward(self, markers):
        return self.layers(markers).squeeze(-1)


def make_batch(generator):
    return {
        "markers": torch.randn(PATIENTS, MARKERS, generator=generator),
        "months": torch.rand(PATIENTS, generator=generator) * 60,
        "died": (torch.rand(PATIENTS, generator=generator) < 0.6).double(),
    }


def partial_likelihood(hazard, months, died):
    order = months.argsort(descending=True)
    hazard, died = hazard[order], died[order]
    at_risk = hazard.logcumsumexp(0)
    return -((hazard - at_risk) * died).sum() / died.sum()


def loss(model, batch):
    return partial_likelihood(model(batch["markers"]), batch["months"], batch["died"])


def collect(local, with_grad=False):
    parts = [torch.zeros_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.detach().contiguous())
    if with_grad:
        parts[dist.get_rank()] = local  # all_gather returns no graph
    return torch.cat(parts)


def step(model, shard, rank):
    ddp = DDP(model, broadcast_buffers=False)
    hazard = collect(ddp(shard["markers"]), with_grad=True)
    months, died = collect(shard["months"]), collect(shard["died"])
    objective = partial_likelihood(hazard, months, died)
    objective.backward()


case = Case(model=Hazard, batch=make_batch, loss=loss, layout="2x2")
