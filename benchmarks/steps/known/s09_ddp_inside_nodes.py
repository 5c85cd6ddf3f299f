"""DistributedDataParallel inside each node; the nodes exchange their gradients afterwards."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        return self.out(F.gelu(self.norm(self.inp(x))))


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def make_batch(generator):
    x = torch.randn(16, 6, generator=generator)
    return x, x[:, :2].sin() + 0.2 * torch.randn(16, 2, generator=generator)


case = Case(model=Net, batch=make_batch, loss=loss, layout="2x2")


def build_groups(rank):
    """The group of my node, and the group of ranks with my local rank on all nodes."""
    size = rank.local_world_size
    nodes = [dist.new_group(range(n * size, (n + 1) * size)) for n in range(rank.nodes)]
    columns = [dist.new_group(range(i, rank.world_size, size)) for i in range(size)]
    return nodes[rank.node], columns[rank.local_rank]


class HybridTrainer:
    def __init__(self, model, rank, weight_decay=0.01):
        node_group, self.cross_group = build_groups(rank)
        self.ddp = DistributedDataParallel(model, process_group=node_group)
        self.matrices = [p for p in model.parameters() if p.dim() >= 2]
        self.vectors = [p for p in model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": self.matrices, "weight_decay": weight_decay},
                {"params": self.vectors, "weight_decay": 0.0},
            ]
        )
        self.nodes = rank.nodes

    def sync_nodes(self):
        for p in self.matrices:
            dist.all_reduce(p.grad, group=self.cross_group)
            p.grad.div_(self.nodes)

    def train_step(self, batch):
        self.optimizer.zero_grad()
        loss(self.ddp, batch).backward()
        self.sync_nodes()


def step(model, shard, rank):
    HybridTrainer(model, rank).train_step(shard)
