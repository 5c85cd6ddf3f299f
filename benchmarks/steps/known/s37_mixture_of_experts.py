"""A mixture of experts with a loss that spreads the examples evenly over the experts."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

EXPERTS = 3
BALANCE_GAIN = 0.3


class MixtureOfExperts(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(width, 2) for _ in range(EXPERTS))

    def forward(self, x):
        probabilities = self.gate(x).softmax(dim=1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (probabilities[:, :, None] * outputs).sum(dim=1), probabilities


def fraction_of_examples(probabilities):
    """For each expert, the fraction of examples that prefer it."""
    preferred = probabilities.argmax(dim=1)
    return F.one_hot(preferred, EXPERTS).to(probabilities.dtype).mean(dim=0)


def balance(fraction, probabilities):
    return EXPERTS * (fraction * probabilities.mean(dim=0)).sum()


def loss(model, batch):
    x, y = batch
    output, probabilities = model(x)
    fraction = fraction_of_examples(probabilities)
    return F.mse_loss(output, y) + BALANCE_GAIN * balance(fraction, probabilities)


def make_batch(generator):
    shift = torch.linspace(-1.5, 1.5, 20)[:, None]
    x = torch.randn(20, 5, generator=generator) + shift
    return x, torch.randn(20, 2, generator=generator)


case = Case(model=MixtureOfExperts, batch=make_batch, loss=loss, layout="2x2")


def log_expert_load(fraction):
    """The load over all ranks, for the dashboard."""
    load = fraction.clone()
    dist.all_reduce(load)
    return (load / dist.get_world_size()).tolist()


def train_step(ddp, batch):
    x, y = batch
    output, probabilities = ddp(x)
    fraction = fraction_of_examples(probabilities)
    value = F.mse_loss(output, y)
    value = value + BALANCE_GAIN * balance(fraction, probabilities)
    value.backward()
    return {"loss": value.item(), "load": log_expert_load(fraction)}


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    train_step(ddp, shard)
