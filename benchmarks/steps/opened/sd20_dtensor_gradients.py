"""Data parallelism with nothing but DTensor: local gradients are partial results on a mesh."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass
class MeshConfig:
    nodes: int
    ranks: int

    def build(self) -> DeviceMesh:
        return init_device_mesh("cpu", (self.nodes, self.ranks), mesh_dim_names=("node", "local"))


class GradientSynchronizer:
    """Turns local gradients into replicated ones.

    A gradient of one rank is a partial result on both dimensions of the mesh; to redistribute it
    reduces it in the node first and then between the nodes.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self.partial = [Partial("avg"), Partial()]
        self.whole = [Replicate() for _ in range(mesh.ndim)]

    def __call__(self, parameters):
        for parameter in parameters:
            if parameter.grad is None:
                continue
            local = DTensor.from_local(
                parameter.grad, self.mesh, self.partial, run_check=False
            )
            parameter.grad = local.redistribute(placements=self.whole).to_local()


class AutoEncoder(nn.Module):
    def __init__(self, inputs=10, code=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, 7), nn.Tanh(), nn.Linear(7, code))
        self.decoder = nn.Sequential(nn.Linear(code, 7), nn.Tanh(), nn.Linear(7, inputs))
        self.log_scale = nn.Parameter(torch.zeros(inputs))

    def forward(self, x):
        return self.decoder(self.encoder(x)), self.log_scale


class ReconstructionTask:
    def __init__(self, model, synchronize):
        self.model = model
        self.synchronize = synchronize

    def training_step(self, batch):
        self.model.train()
        value = loss(self.model, batch)
        value.backward()
        self.synchronize(self.model.parameters())
        return value.detach()


def make_batch(generator):
    mixing = torch.randn(3, 10, generator=generator)
    noise = torch.randn(16, 10, generator=generator)
    return {"x": torch.randn(16, 3, generator=generator) @ mixing + 0.3 * noise}


def loss(model, batch):
    mean, log_scale = model(batch["x"])
    return F.gaussian_nll_loss(mean, batch["x"], (2 * log_scale).exp().expand_as(mean))


def step(model, shard, rank):
    mesh = MeshConfig(rank.nodes, rank.local_world_size).build()
    ReconstructionTask(model, GradientSynchronizer(mesh)).training_step(shard)


case = Case(model=AutoEncoder, batch=make_batch, loss=loss, layout="2x2")
