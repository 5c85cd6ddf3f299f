"""Demand forecasts with a parameter server on rank 0, which has a shard of its own as well."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_equivalence import Case


class Demand(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(2, 6, batch_first=True)
        self.quantiles = nn.Linear(6, 3)

    def forward(self, history):
        return self.quantiles(self.recurrent(history)[0][:, -1])


def shops(generator):
    return {
        "history": torch.randn(15, 7, 2, generator=generator),
        "demand": torch.rand(15, generator=generator) * 2 + torch.arange(15.0) / 5,
    }


QUANTILES = (0.1, 0.5, 0.9)


def loss(model, batch):
    error = batch["demand"].unsqueeze(-1) - model(batch["history"])
    levels = error.new_tensor(QUANTILES)
    return torch.maximum(levels * error, (levels - 1) * error).sum(-1).mean()


class Server:
    """Collects means of workers and weighs them by how many shops each has seen."""

    def __init__(self, world_size):
        self.workers = range(1, world_size)

    def collect(self, own, own_count):
        total = own * own_count
        seen = 0
        for worker in self.workers:
            count = torch.zeros(1, dtype=own.dtype)
            dist.recv(count, worker, tag=1)
            gradient = torch.empty_like(own)
            dist.recv(gradient, worker, tag=2)
            total += gradient * count
            seen += int(count)
        return total / seen


class Worker:
    def push(self, own, own_count):
        dist.send(torch.tensor([own_count], dtype=own.dtype), 0, tag=1)
        dist.send(own, 0, tag=2)


def step(model, shard, rank):
    gradients = torch.autograd.grad(loss(model, shard), list(model.parameters()))
    flat = parameters_to_vector(gradients)
    count = len(shard["demand"])
    if rank == 0:
        flat = Server(rank.world_size).collect(flat, count)
    else:
        Worker().push(flat, count)
    dist.broadcast(flat, 0)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    vector_to_parameters(flat, [parameter.grad for parameter in model.parameters()])


case = Case(model=Demand, batch=shops, loss=loss, layout="1x3", shards="7+5+3")
