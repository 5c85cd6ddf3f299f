"""A Megatron-style MLP: tensor parallel inside a node, data parallel between the nodes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass(frozen=True)
class Config:
    features: int = 6
    hidden: int = 8
    ffn: int = 12
    classes: int = 5
    batch: int = 16
    tensor_parallel: int = 2


CFG = Config()


class CopyToTensorRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromTensorRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ParallelLinear(nn.Linear):
    """Keeps the full weight; once a group is set, a rank multiplies by its own slice only."""

    group = None

    def own(self, tensor, dim):
        size, index = dist.get_world_size(self.group), dist.get_rank(self.group)
        return tensor.chunk(size, dim)[index]


class ColumnParallelLinear(ParallelLinear):
    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        x = CopyToTensorRegion.apply(x, self.group)
        return F.linear(x, self.own(self.weight, 0), self.own(self.bias, 0))


class RowParallelLinear(ParallelLinear):
    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        out = F.linear(x, self.own(self.weight, 1), self.bias)
        return ReduceFromTensorRegion.apply(out, self.group)


class Net(nn.Module):
    def __init__(self, cfg=CFG):
        super().__init__()
        self.stem = nn.Linear(cfg.features, cfg.hidden)
        self.norm = nn.LayerNorm(cfg.hidden)
        self.up = ColumnParallelLinear(cfg.hidden, cfg.ffn)
        self.down = RowParallelLinear(cfg.ffn, cfg.hidden)
        self.head = nn.Linear(cfg.hidden, cfg.classes)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x)

    def sharded_parameters(self):
        return [self.up.weight, self.up.bias, self.down.weight]


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def make_batch(generator):
    return {
        "x": torch.randn(CFG.batch, CFG.features, generator=generator),
        "y": torch.randint(CFG.classes, (CFG.batch,), generator=generator),
    }


case = Case(model=Net, batch=make_batch, loss=loss, layout="2x2", shards="own")


def sync_gradients(model, tensor_group, data_group):
    for parameter in model.sharded_parameters():
        dist.all_reduce(parameter.grad, group=tensor_group)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=data_group)
        parameter.grad.div_(dist.get_world_size(data_group))


def step(model, batch, rank):
    replicas = rank.world_size // CFG.tensor_parallel
    mesh = init_device_mesh("cpu", (replicas, CFG.tensor_parallel), mesh_dim_names=("dp", "tp"))
    tensor_group, data_group = mesh.get_group("tp"), mesh.get_group("dp")
    model.up.group = model.down.group = tensor_group
    index = mesh.get_local_rank("dp")
    mine = {key: value.chunk(replicas)[index] for key, value in batch.items()}
    loss(model, mine).backward()
    sync_gradients(model, tensor_group, data_group)
