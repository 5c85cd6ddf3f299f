"""HSDP with clipping by the global norm, computed from the local shards in one all-reduce."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case

MAX_NORM = 0.25
LR = 0.5


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(5, 12), nn.Linear(12, 12)])
        self.out = nn.Linear(12, 4)

    def forward(self, values):
        for layer in self.body:
            values = torch.relu(layer(values))
        return self.out(values)


def samples(generator):
    return {
        "x": torch.randn(16, 5, generator=generator),
        "y": 3 * torch.randn(16, 4, generator=generator),
    }


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR)


def hybrid_mesh(rank) -> DeviceMesh:
    shape = (rank.nodes, rank.local_world_size)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))


@torch.no_grad()
def clip_by_global_norm(parameters, mesh: DeviceMesh, max_norm: float) -> float:
    gradients = [p.grad.to_local() for p in parameters if p.grad is not None]
    squares = torch.stack([gradient.pow(2).sum() for gradient in gradients]).sum()
    dist.all_reduce(squares, group=mesh._flatten("dp").get_group())
    norm = math.sqrt(squares.item())
    factor = min(1.0, max_norm / (norm + 1e-6))
    for gradient in gradients:
        gradient.mul_(factor)
    return norm


def step(model, shard, rank):
    mesh = hybrid_mesh(rank)
    for layer in model.body:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters)
    loss(model, shard).backward()
    clip_by_global_norm(parameters, mesh, MAX_NORM)
    optimizer.step()


case = Case(model=Regressor, batch=samples, loss=loss, layout="2x2")
options = {"compare": "update", "optimizer": make_optimizer, "clip": MAX_NORM}
