"""Fully sharded blocks; vectors are too small to be worth sharding, and stay whole."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddp_equivalence import Case

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["label"])


def make_batch(generator):
    return {
        "x": torch.randn(10, 6, generator=generator),
        "label": torch.randint(0, 4, (10,), generator=generator),
    }


case = Case(model=Net, batch=make_batch, loss=loss, layout="1x2")


class ShardedTrainer:
    def __init__(self, model, world_size):
        self.world_size = world_size
        whole = {p for p in model.parameters() if p.ndim < 2}
        mesh = init_device_mesh(next(model.parameters()).device.type, (world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, ignored_params=whole)
        fully_shard(model, mesh=mesh, ignored_params=whole)
        self.model = model
        self.replicated = [p for name, p in model.named_parameters() if name.endswith(".bias")]

    def sync_replicated(self):
        """Sharded parameters are reduced by their hooks, and replicated ones here."""
        for p in self.replicated:
            dist.all_reduce(p.grad)
            p.grad.div_(self.world_size)

    def train_step(self, batch):
        loss(self.model, batch).backward()
        self.sync_replicated()


def full(grad):
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def step(model, shard, rank):
    model.zero_grad()
    ShardedTrainer(model, rank.world_size).train_step(shard)
    return {name: full(p.grad) for name, p in model.named_parameters()}
