"""Attention with per-head QK-norm, tensor parallel inside of a node, data parallel over nodes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ddp_equivalence import Case

DIM, HEADS, HEAD_DIM, SEQ = 16, 4, 6, 7


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.q_norm = nn.RMSNorm(HEAD_DIM, eps=1e-6)
        self.k_norm = nn.RMSNorm(HEAD_DIM, eps=1e-6)

    def forward(self, x):
        # -1: the number of heads is the local one under tensor parallelism
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)) for w in (self.wq, self.wk, self.wv))
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 3)

    def forward(self, x):
        return self.head(self.norm(x + self.attention(x)))


def batch(generator):
    return {
        "x": torch.randn(8, SEQ, DIM, generator=generator),
        "y": torch.randn(8, SEQ, 3, generator=generator),
    }


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


PLAN = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
}


def reduce_head_parameters(model, group):
    """A norm over head_dim is kept whole on every rank, which sees only the rank's own heads."""
    for norm in (model.attention.q_norm,):
        dist.all_reduce(norm.weight.grad, group=group)


def average_over_replicas(model, group):
    for p in model.parameters():
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        dist.all_reduce(grad, group=group)
        grad.div_(dist.get_world_size(group))


def step(model, batch, rank):
    mesh = init_device_mesh(
        "cpu", (rank.nodes, rank.local_world_size), mesh_dim_names=("dp", "tp")
    )
    parallelize_module(model, mesh["tp"], PLAN)
    dp = mesh["dp"]
    mine = {name: t.chunk(dp.size())[dp.get_local_rank()] for name, t in batch.items()}
    loss(model, mine).backward()
    reduce_head_parameters(model, mesh.get_group("tp"))
    average_over_replicas(model, mesh.get_group("dp"))


case = Case(model=Regressor, batch=batch, loss=loss, layout="2x2", shards="own")
