"""A functional training step: torch.func.functional_call, and gradients from autograd.grad."""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from ddp_equivalence import Case

MICRO_BATCHES = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


def loss(model, batch):
    x, y = batch
    return F.huber_loss(model(x), y)


def make_batch(generator):
    x = torch.randn(12, 4, generator=generator)
    return x, torch.randn(12, 2, generator=generator)


case = Case(model=Net, batch=make_batch, loss=loss, layout="1x2")


def loss_of(model, params, batch):
    x, y = batch
    return F.huber_loss(functional_call(model, params, (x,)), y)


def local_gradients(model, params, batch):
    """The gradients of the mean over this rank's examples, by name."""
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    chunks = zip(*(part.chunk(MICRO_BATCHES) for part in batch), strict=True)
    for chunk in chunks:
        value = loss_of(model, params, chunk) / MICRO_BATCHES
        gradients = torch.autograd.grad(value, list(params.values()))
        total.update(zip(params, gradients, strict=True))
    return total


def average(gradients):
    world_size = dist.get_world_size()
    for name in sorted(gradients):
        gradient = gradients[name]
        dist.all_reduce(gradient)
        gradient.div_(world_size)
    return gradients


def step(model, shard, rank):
    params = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    gradients = average(local_gradients(model, params, shard))
    for name, p in model.named_parameters():
        p.grad = gradients[name]
