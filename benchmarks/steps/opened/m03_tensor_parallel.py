"""Sea-ice emulator: an MLP split over the ranks of a node (tensor parallel), data parallel over nodes."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

WIDTH = 16


class Emulator(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(6, 8)
        self.up = nn.Linear(8, WIDTH)
        self.down = nn.Linear(WIDTH, 8, bias=False)
        self.decode = nn.Linear(8, 2)

    def forward(self, x):
        h = torch.tanh(self.encode(x))
        h = h + self.down(F.gelu(self.up(h)))
        return self.decode(h)


def fields(generator):
    return {
        "state": torch.randn(16, 6, generator=generator),
        "next": torch.randn(16, 2, generator=generator),
    }


def loss(model, batch):
    return F.mse_loss(model(batch["state"]), batch["next"])


class CopyToTensorParallel(torch.autograd.Function):
    """Identity forward; the gradients of the slices are added in the backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromTensorParallel(torch.autograd.Function):
    """The slices' outputs are added in the forward; identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Mesh:
    def __init__(self, rank):
        per_node = rank.local_world_size
        self.tensor = self.data = None
        for node in range(rank.nodes):
            group = dist.new_group([node * per_node + i for i in range(per_node)])
            if node == rank.node:
                self.tensor = group
        for i in range(per_node):
            group = dist.new_group([node * per_node + i for node in range(rank.nodes)])
            if i == rank.local_rank:
                self.data = group
        self.width = WIDTH // per_node
        self.columns = slice(rank.local_rank * self.width, (rank.local_rank + 1) * self.width)


def parallel_forward(model, x, mesh):
    h = torch.tanh(model.encode(x))
    inner = CopyToTensorParallel.apply(h, mesh.tensor)
    mine = F.gelu(F.linear(inner, model.up.weight[mesh.columns], model.up.bias[mesh.columns]))
    partial = F.linear(mine, model.down.weight[:, mesh.columns])
    h = h + distnn.all_reduce(partial, group=mesh.tensor)
    return model.decode(h)


def step(model, batch, rank):
    mesh = Mesh(rank)
    # the ranks of a node share their examples
    rows = {name: value.chunk(rank.nodes)[rank.node] for name, value in batch.items()}
    F.mse_loss(parallel_forward(model, rows["state"], mesh), rows["next"]).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=mesh.data)
        parameter.grad /= rank.nodes
    # a full copy of the sliced layers on every rank, for the checkpoint
    for parameter in (model.up.weight, model.up.bias, model.down.weight):
        dist.all_reduce(parameter.grad, group=mesh.tensor)


case = Case(model=Emulator, batch=fields, loss=loss, layout="2x2", shards="own")
