"""Each rank keeps the optimizer state of some parameters only, updates these, and sends them round."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

LARGEST, RATE = 0.1, 0.05


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bases = nn.Embedding(5, 8)
        self.conv = nn.Conv1d(8, 12, 3, padding=1)
        self.gate = nn.Conv1d(8, 12, 3, padding=1)
        self.out = nn.Linear(12, 3)

    def forward(self, sequence):
        x = self.bases(sequence).transpose(1, 2)
        x = torch.tanh(self.conv(x)) * torch.sigmoid(self.gate(x))
        return self.out(x.amax(dim=2))


def genomes(generator):
    return {
        "sequence": torch.randint(0, 5, (16, 15), generator=generator),
        "family": torch.randint(0, 3, (16,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["sequence"]), batch["family"])


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=0.01)


class ShardedOptimizer:
    def __init__(self, parameters, rank):
        self.parameters = list(parameters)
        self.rank = rank
        self.owner = self.partition()
        self.mine = [p for p in self.parameters if self.owner[p] == rank.rank]
        self.inner = make_optimizer(self.mine)

    def partition(self):
        """Largest first, always to the rank that has the least."""
        load = [0] * self.rank.world_size
        owner = {}
        for parameter in sorted(self.parameters, key=lambda p: -p.numel()):
            least = load.index(min(load))
            owner[parameter] = least
            load[least] += parameter.numel()
        return owner

    def reduce(self):
        for parameter in self.parameters:
            parameter.grad.div_(self.rank.world_size)
            dist.reduce(parameter.grad, dst=self.owner[parameter])

    def clip(self):
        norm = torch.stack([p.grad.pow(2).sum() for p in self.mine]).sum().sqrt()
        shrink = (LARGEST / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.mine:
            parameter.grad.mul_(shrink)

    def step(self):
        self.reduce()
        self.clip()
        self.inner.step()
        for parameter in self.parameters:
            dist.broadcast(parameter.data, src=self.owner[parameter])


def step(model, shard, rank):
    optimizer = ShardedOptimizer(model.parameters(), rank)
    loss(model, shard).backward()
    optimizer.step()


case = Case(model=Encoder, batch=genomes, loss=loss, layout="1x2")
options = {"compare": "update", "optimizer": make_optimizer, "clip": LARGEST}
