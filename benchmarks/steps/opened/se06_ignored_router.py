"""Mixture of experts: the experts are sharded with fully_shard, the small routers are not."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case

WIDTH, EXPERTS = 8, 3


class SoftMoE(nn.Module):
    """Every expert sees every token, weighted by the router."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.3)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        hidden = F.silu(torch.einsum("bi,eih->beh", x, self.up))
        out = torch.einsum("beh,eho->beo", hidden, self.down)
        return x + torch.einsum("be,beo->bo", weights, out)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([SoftMoE(), SoftMoE()])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(generator):
    return {
        "x": torch.randn(20, WIDTH, generator=generator),
        "y": torch.randint(0, 4, (20,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def routers(model):
    return [layer.gate.weight for layer in model.layers]


def parallelize(model, mesh):
    # A router is 3 x 8: not worth an all-gather, and the logits stay in full precision.
    ignored = set(routers(model))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)


def sync_routers(model, mesh):
    """What FSDP leaves alone is reduced here, in one flat buffer."""
    grads = [w.grad for w in routers(model)]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=mesh.get_group())
    for g, reduced in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(reduced.view_as(g))


def step(model, shard, rank):
    mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("dp",))
    parallelize(model, mesh)
    loss(model, shard).backward()
    sync_routers(model, mesh)


case = Case(model=Model, batch=batch, loss=loss, layout="1x2")
