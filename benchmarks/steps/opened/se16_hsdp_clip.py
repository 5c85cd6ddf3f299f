"""HSDP with hand-written clipping that needs one collective for the norm of all gradients."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case

MAX_NORM = 0.2
LR = 0.02


class GatedBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.value = nn.Linear(dim, dim)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.value(x) * torch.sigmoid(self.gate(x))


class Regressor(nn.Module):
    def __init__(self, features=6, dim=9):
        super().__init__()
        self.stem = nn.Linear(features, dim)
        self.blocks = nn.ModuleList(GatedBlock(dim) for _ in range(2))
        self.head = nn.Linear(dim, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(generator):
    x = torch.randn(16, 6, generator=generator)
    return {"x": x, "y": 3 * torch.stack([x[:, 0] * x[:, 1], x.cos().sum(1)], 1)}


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=LR)


@torch.no_grad()
def clip_grad_norm_(parameters, max_norm, group=None):
    """Like torch.nn.utils.clip_grad_norm_, with a single all-reduce of all squares."""
    grads = [p.grad.to_local() for p in parameters if p.grad is not None]
    # a rank may hold no rows at all of a small parameter
    squares = torch.stack([g.square().sum() for g in grads]).sum()
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return norm


class Engine:
    def __init__(self, model, mesh):
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        self.mesh = mesh
        self.optimizer = make_optimizer(model.parameters())

    def train_step(self, data):
        self.optimizer.zero_grad()
        value = loss(self.model, data)
        value.backward()
        norm = clip_grad_norm_(list(self.model.parameters()), MAX_NORM)
        self.optimizer.step()
        return {"loss": value.item(), "grad_norm": norm.item()}


def step(model, shard, rank):
    mesh = init_device_mesh(
        "cpu", (rank.nodes, rank.local_world_size), mesh_dim_names=("replicate", "shard")
    )
    Engine(model, mesh).train_step(shard)


case = Case(model=Regressor, batch=batch, loss=loss, layout="2x2")
options = {"compare": "update", "optimizer": make_optimizer, "clip": MAX_NORM}
