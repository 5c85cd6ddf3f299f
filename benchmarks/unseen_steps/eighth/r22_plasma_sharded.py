"""A surrogate of plasma transport. Every rank updates its part of the flat weights (ZeRO stage 2), with clipping."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

PROFILES, POINTS, FLUXES = 16, 10, 3
LEARNING_RATE = 0.2
MAX_NORM = 0.4


def build_model():
    return nn.Sequential(
        nn.Linear(POINTS, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, FLUXES)
    )


def make_batch(generator):
    return {
        "profile": torch.randn(PROFILES, POINTS, generator=generator),
        "flux": 3 * torch.randn(PROFILES, FLUXES, generator=generator),
    }


def loss(model, batch):
    return F.mse_loss(model(batch["profile"]), batch["flux"])


class ShardedSGD:
    """Gradients are averaged into slices, one for each rank; weights are gathered after the update."""

    def __init__(self, parameters, rank, lr, max_norm):
        self.parameters = list(parameters)
        self.me, self.world_size = rank.rank, rank.world_size
        self.lr, self.max_norm = lr, max_norm
        self.elements = sum(p.numel() for p in self.parameters)
        self.slice = -(-self.elements // self.world_size)

    def flat(self, tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        return F.pad(flat, (0, self.slice * self.world_size - self.elements))

    def my_gradient(self):
        gradient = self.flat([p.grad for p in self.parameters])
        # reduce-scatter, which gloo does not have
        dist.all_reduce(gradient)
        return gradient.view(self.world_size, self.slice)[self.me] / self.world_size

    def clip(self, gradient):
        square = gradient.square().sum()
        norm = square.sqrt()
        return gradient * (self.max_norm / (norm + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def step(self):
        gradient = self.clip(self.my_gradient())
        weights = self.flat(self.parameters).view(self.world_size, self.slice)
        mine = weights[self.me] - self.lr * gradient
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine)
        self.write(torch.cat(parts)[: self.elements])

    def write(self, weights):
        for parameter, new in zip(
            self.parameters, weights.split([p.numel() for p in self.parameters])
        ):
            parameter.copy_(new.view_as(parameter))


def step(model, shard, rank):
    optimizer = ShardedSGD(model.parameters(), rank, LEARNING_RATE, MAX_NORM)
    loss(model, shard).backward()
    optimizer.step()


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")
options = {"compare": "update", "lr": LEARNING_RATE, "clip": MAX_NORM}
