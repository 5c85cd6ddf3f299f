"""Data parallelism with nothing but DTensor: rows are Shard(0), weights are Replicate()."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ddp_equivalence import Case


class TwoLayers(nn.Module):
    def __init__(self, features=7, width=12, targets=3):
        super().__init__()
        self.first = nn.Parameter(torch.randn(features, width) / features**0.5)
        self.second = nn.Parameter(torch.randn(width, targets) / width**0.5)

    def forward(self, x):
        return torch.relu(x @ self.first) @ self.second


def batch(generator):
    return {
        "x": torch.randn(12, 7, generator=generator),
        "y": torch.randn(12, 3, generator=generator),
    }


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def replicate_parameters(model, mesh):
    for name, p in list(model.named_parameters()):
        placed = distribute_tensor(p.detach(), mesh, [Replicate()])
        model.register_parameter(name, nn.Parameter(placed))


class SpmdStep:
    """The same code as on one device, on global tensors: the mean runs over the rows of all ranks."""

    def __init__(self, model, world_size):
        self.mesh = init_device_mesh("cpu", (world_size,))
        self.model = model
        replicate_parameters(model, self.mesh)

    def shard_rows(self, local):
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False)

    def __call__(self, shard):
        rows = {name: self.shard_rows(t) for name, t in shard.items()}
        loss(self.model, rows).backward()
        return self.collect()

    def collect(self):
        grads = {}
        for name, p in self.model.named_parameters():
            # weights are replicated, so the local tensor has the shape of the weight
            grads[name] = p.grad.to_local()
        return grads


def step(model, shard, rank):
    return SpmdStep(model, rank.world_size)(shard)


case = Case(model=TwoLayers, batch=batch, loss=loss, layout="1x2")
