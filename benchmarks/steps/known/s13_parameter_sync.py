"""Ranks start from the parameters of rank 0 and average their gradients by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


class Autoencoder(nn.Module):
    def __init__(self, size=8, code=3):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.encoder = nn.Linear(size, code)
        self.decoder = nn.Linear(code, size)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x - self.mean)))


def loss(model, x):
    return F.mse_loss(model(x), x)


def make_batch(generator):
    return torch.randn(10, 8, generator=generator)


case = Case(model=Autoencoder, batch=make_batch, loss=loss, layout="2x1")


class Synchronizer:
    def __init__(self, model):
        self.params = filter(lambda p: p.requires_grad, model.parameters())
        self.buffers = list(model.buffers())
        self.world_size = dist.get_world_size()

    @torch.no_grad()
    def broadcast_from_rank_0(self):
        for p in self.params:
            dist.broadcast(p, src=0)
        for b in self.buffers:
            dist.broadcast(b, src=0)

    def average_gradients(self):
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad.div_(self.world_size)


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.sync = Synchronizer(model)
        self.sync.broadcast_from_rank_0()

    def train_step(self, batch):
        self.optimizer.zero_grad()
        value = loss(self.model, batch)
        value.backward()
        self.sync.average_gradients()
        return value.detach()


def step(model, shard, rank):
    Trainer(model).train_step(shard)
