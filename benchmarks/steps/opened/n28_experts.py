"""A small mixture of experts for logs of requests, with the usual balancing loss on the router."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

REQUESTS, FIELDS, EXPERTS, CLASSES = 16, 8, 4, 5
BALANCE = 0.5


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(FIELDS, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(FIELDS, 10), nn.ReLU(), nn.Linear(10, CLASSES))
            for _ in range(EXPERTS)
        )

    def forward(self, requests):
        probabilities = self.router(requests).softmax(-1)
        gate, chosen = probabilities.max(-1)
        outputs = torch.stack([expert(requests) for expert in self.experts], dim=1)
        picked = outputs[torch.arange(len(requests)), chosen]
        return gate[:, None] * picked, probabilities, chosen


def make_batch(generator):
    kinds = torch.linspace(-2, 2, REQUESTS)[:, None]  # the log changes over the day
    direction = torch.randn(1, FIELDS, generator=generator)
    return {
        "requests": kinds * direction + torch.randn(REQUESTS, FIELDS, generator=generator),
        "outcome": torch.randint(CLASSES, (REQUESTS,), generator=generator),
    }


class Load:
    """How the router spreads the requests: the fraction that each expert gets."""

    def __init__(self):
        self.history = []

    def fraction(self, chosen, dtype):
        fraction = F.one_hot(chosen, EXPERTS).to(dtype).mean(0)
        self.history.append(fraction)
        return fraction

    def logged(self):
        """Mean over the ranks, for the dashboard."""
        last = self.history[-1].clone()
        if dist.is_initialized():
            dist.all_reduce(last)
            last /= dist.get_world_size()
        return last


def balance(probabilities, fraction):
    return EXPERTS * (fraction * probabilities.mean(0)).sum()


def objective(model, batch, load):
    logits, probabilities, chosen = model(batch["requests"])
    fraction = load.fraction(chosen, probabilities.dtype)
    return F.cross_entropy(logits, batch["outcome"]) + BALANCE * balance(probabilities, fraction)


def loss(model, batch):
    return objective(model, batch, Load())


def step(model, shard, rank):
    ddp = DDP(model, find_unused_parameters=True)
    load = Load()
    objective(ddp, shard, load).backward()
    load.logged()


case = Case(model=Mixture, batch=make_batch, loss=loss)
