"""Regression on random Fourier features. Workers build a model and receive rank 0's weights."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


class FourierRegressor(nn.Module):
    def __init__(self, inputs=4, features=6):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(inputs, features))
        self.hidden = nn.Linear(2 * features, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        angles = x @ self.frequencies
        features = torch.cat([angles.sin(), angles.cos()], dim=-1)
        return self.head(torch.tanh(self.hidden(features)))


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def make_batch(generator):
    return {
        "x": torch.randn(12, 4, generator=generator),
        "y": torch.randn(12, 2, generator=generator),
    }


case = Case(model=FourierRegressor, batch=make_batch, loss=loss, layout="2x1")


class Worker:
    """Trains a replica of the model, which starts from the weights of rank 0."""

    def __init__(self, model, rank):
        self.rank = rank
        if rank.rank == 0:
            self.replica = model
        else:
            dtype = next(model.parameters()).dtype
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(1000 + rank.rank)
                self.replica = FourierRegressor().to(rank.device, dtype)
        self.receive(self.replica.parameters())

    def receive(self, tensors):
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)

    def average_gradients(self):
        for p in self.replica.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.rank.world_size


def step(model, shard, rank):
    worker = Worker(model, rank)
    worker.replica.zero_grad()
    loss(worker.replica, shard).backward()
    worker.average_gradients()
    for p, trained in zip(model.parameters(), worker.replica.parameters(), strict=True):
        p.grad = trained.grad
