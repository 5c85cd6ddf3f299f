"""An all-reduce around a ring, written with send and receive."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from ddp_equivalence import Case


def build_model():
    return nn.Sequential(
        nn.Linear(4, 9),
        nn.SiLU(),
        nn.Linear(9, 2),
    )


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def make_batch(generator):
    x = torch.randn(16, 4, generator=generator)
    y = torch.stack([x.sum(1), x.prod(1)], dim=1)
    return x, y + 0.1 * torch.randn(16, 2, generator=generator)


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x4")


class Ring:
    def __init__(self, rank, world_size):
        self.rank = rank
        self.world_size = world_size
        self.next = (rank + 1) % world_size
        self.previous = (rank - 1) % world_size

    def shift(self, outgoing):
        """Send to the next rank and return what came from the previous one."""
        incoming = torch.empty_like(outgoing)
        request = dist.isend(outgoing, dst=self.next)
        dist.recv(incoming, src=self.previous)
        request.wait()
        return incoming

    def mean(self, tensor):
        """All ranks add in the order of the ranks, so that they round alike."""
        parts = {self.rank: tensor}
        passing = tensor.clone()
        for hop in range(1, self.world_size - 1):
            passing = self.shift(passing)
            parts[(self.rank - hop) % self.world_size] = passing
        return sum(parts[rank] for rank in sorted(parts)) / self.world_size


def set_gradients(params, vector):
    start = 0
    for p in params:
        p.grad.copy_(vector[start : start + p.numel()].view_as(p))
        start += p.numel()


def step(model, shard, rank):
    ring = Ring(rank.rank, rank.world_size)
    params = list(model.parameters())
    loss(model, shard).backward()
    gradients = parameters_to_vector([p.grad for p in params])
    set_gradients(params, ring.mean(gradients))
