"""2-D parallelism: tensor parallel feed-forward layers, and fully_shard over the data dimension."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Case

ROWS = 16
TP_DEGREE = 2


class FeedForward(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, states):
        return self.w2(nn.functional.silu(self.w1(states)) * self.w3(states))


class Model(nn.Module):
    def __init__(self, inputs=6, width=8, hidden=12, layers=2, outputs=3):
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(FeedForward(width, hidden) for _ in range(layers))
        self.output = nn.Linear(width, outputs)

    def forward(self, rows):
        states = self.embed(rows)
        for layer in self.layers:
            states = states + layer(states)
        return self.output(states)


def make_batch(generator):
    return {
        "rows": torch.randn(ROWS, 6, generator=generator),
        "targets": torch.randn(ROWS, 3, generator=generator),
    }


def criterion(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


def loss(model, batch):
    return criterion(model(batch["rows"]), batch["targets"])


def parallelize(model, mesh):
    plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def build_loader(batch, replicas, index):
    dataset = TensorDataset(batch["rows"], batch["targets"])
    sampler = DistributedSampler(dataset, num_replicas=replicas, rank=index, shuffle=False)
    return DataLoader(dataset, batch_size=ROWS // replicas, sampler=sampler)


def step(model, batch, rank):
    mesh = init_device_mesh(
        "cpu", (rank.world_size // TP_DEGREE, TP_DEGREE), mesh_dim_names=("dp", "tp")
    )
    model = parallelize(model, mesh)
    loader = build_loader(batch, rank.world_size, rank.rank)
    for rows, targets in loader:
        criterion(model(rows), targets).backward()


case = Case(model=Model, batch=make_batch, loss=loss, layout="2x2", shards="own")
