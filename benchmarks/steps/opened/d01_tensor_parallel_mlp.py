"""Feed-forward blocks split over the tensor-parallel pair, replicas over the data-parallel pair."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass(frozen=True)
class ParallelConfig:
    tensor: int = 2
    hidden: int = 8
    width: int = 16
    examples: int = 16


CONFIG = ParallelConfig()


class Block(nn.Module):
    def __init__(self, hidden, width):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(CONFIG.hidden, CONFIG.width) for _ in range(2))
        self.head = nn.Linear(CONFIG.hidden, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def make_batch(generator):
    n = CONFIG.examples
    return {"x": torch.randn(n, CONFIG.hidden, generator=generator), "y": torch.randn(n, 3, generator=generator)}


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ParallelGroups:
    def __init__(self, rank):
        world, tp = dist.get_world_size(), CONFIG.tensor
        for start in range(0, world, tp):
            group = dist.new_group(list(range(start, start + tp)))
            if start <= rank < start + tp:
                self.tensor = group
        self.tensor_rank, self.data_rank = rank % tp, rank // tp
        self.data_size = world // tp


def parallel_block(block, x, groups):
    size = CONFIG.width // CONFIG.tensor
    mine = slice(groups.tensor_rank * size, (groups.tensor_rank + 1) * size)
    h = CopyToRegion.apply(block.norm(x), groups.tensor)
    h = F.gelu(F.linear(h, block.up.weight[mine], block.up.bias[mine]))
    partial = F.linear(h, block.down.weight[:, mine], block.down.bias)
    return x + ReduceFromRegion.apply(partial, groups.tensor)


def step(model, shard, rank):
    groups = ParallelGroups(dist.get_rank())
    x = shard["x"].chunk(groups.data_size)[groups.data_rank]
    y = shard["y"].chunk(groups.data_size)[groups.data_rank]
    for block in model.blocks:
        x = parallel_block(block, x, groups)
    F.mse_loss(model.head(x), y).backward()
    for name, parameter in model.named_parameters():
        split = ".up." in name or name.endswith("down.weight")
        dist.all_reduce(parameter.grad)
        parameter.grad /= groups.data_size if split else dist.get_world_size()


case = Case(model=Regressor, batch=make_batch, loss=loss, layout="1x4", shards="own")
