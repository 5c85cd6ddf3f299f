"""2-D training: tensor parallel inside of a node, fully_shard over nodes, own data loading."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ddp_equivalence import Case

DIM, HIDDEN, CLASSES = 8, 20, 5


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x):
        return x + self.w2(F.silu(self.w1(x)) * self.w3(x))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([SwiGLU(), SwiGLU()])
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(generator):
    return {
        "x": torch.randn(12, DIM, generator=generator),
        "label": torch.randint(0, CLASSES, (12,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["label"])


class Job(NamedTuple):
    rank: int
    dp_degree: int
    tp_degree: int

    @property
    def dp_rank(self):
        return self.rank % self.dp_degree

    def mesh(self):
        return init_device_mesh(
            "cpu", (self.dp_degree, self.tp_degree), mesh_dim_names=("dp", "tp")
        )

    def rows(self, data):
        """The rows of this rank's data parallel group member; tensor parallel peers share them."""
        return {k: t.tensor_split(self.dp_degree)[self.dp_rank] for k, t in data.items()}


def parallelize(model, mesh):
    plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def step(model, batch, rank):
    job = Job(rank.rank, dp_degree=rank.nodes, tp_degree=rank.local_world_size)
    parallelize(model, job.mesh())
    loss(model, job.rows(batch)).backward()


case = Case(model=Stack, batch=batch, loss=loss, layout="2x2", shards="own")
