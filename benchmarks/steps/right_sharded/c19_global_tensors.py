"""Data parallelism without any wrapper: inputs are DTensors sharded by rows, weights are replicated.

The loss is written as if one device held everything. DTensor finds out which collectives it needs.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
)

from ddp_equivalence import Case


class Normalized(nn.Module):
    """Two layers with the statistics of the whole batch in between."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 10, bias=False)
        self.second = nn.Linear(10, 3)

    def forward(self, rows):
        hidden = self.first(rows)
        centred = hidden - hidden.mean(dim=0, keepdim=True)
        spread = centred.pow(2).mean(dim=0, keepdim=True)
        return self.second(torch.relu(centred * (spread + 1e-3).rsqrt()))


def make_batch(generator):
    rows = torch.randn(16, 6, generator=generator) * torch.linspace(0.5, 3, 16)[:, None]
    return {"rows": rows, "targets": torch.randn(16, 3, generator=generator)}


def loss(model, batch):
    error = model(batch["rows"]) - batch["targets"]
    return error.pow(2).mean()


def as_global(shard, mesh):
    """The batch of all ranks, of which this rank holds its shard."""
    return {name: DTensor.from_local(rows, mesh, [Shard(0)]) for name, rows in shard.items()}


def step(model, shard, rank):
    mesh = init_device_mesh("cpu", (rank.world_size,))
    distribute_module(model, mesh)
    value = loss(model, as_global(shard, mesh))
    value.redistribute(placements=[Replicate()]).backward()
    return {
        name: parameter.grad.redistribute(placements=[Replicate()]).to_local()
        for name, parameter in model.named_parameters()
    }


case = Case(model=Normalized, batch=make_batch, loss=loss, layout="1x2")
