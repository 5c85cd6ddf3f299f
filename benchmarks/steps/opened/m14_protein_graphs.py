"""Node classification on protein graphs of very different sizes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

NODES, FEATURES, SITES = 9, 5, 3


class MessagePassing(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.neighbours = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, adjacency):
        degree = adjacency.sum(-1, keepdim=True).clamp(min=1)
        return self.own(x) + self.neighbours(adjacency @ x / degree)


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = MessagePassing(FEATURES, 12)
        self.second = MessagePassing(12, SITES)

    def forward(self, batch):
        hidden = F.relu(self.first(batch["x"], batch["adjacency"]))
        return self.second(hidden, batch["adjacency"])


def proteins(generator):
    sizes = torch.randint(2, NODES + 1, (16,), generator=generator)
    present = torch.arange(NODES) < sizes.unsqueeze(-1)
    edges = torch.rand(16, NODES, NODES, generator=generator) < 0.4
    edges = (edges | edges.transpose(1, 2)) & present.unsqueeze(1) & present.unsqueeze(2)
    return {
        "x": torch.randn(16, NODES, FEATURES, generator=generator),
        "adjacency": edges.float(),
        "site": torch.randint(SITES, (16, NODES), generator=generator),
        "present": present,
    }


def node_losses(model, batch):
    logits = model(batch)[batch["present"]]
    return F.cross_entropy(logits, batch["site"][batch["present"]], reduction="none")


def loss(model, batch):
    return node_losses(model, batch).mean()


def across_ranks(value, op):
    value = torch.as_tensor(float(value), dtype=torch.float64)
    dist.all_reduce(value, op=op)
    return value


class NodeTrainer:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(model)

    def normalizer(self, batch):
        """Nodes per rank, the same number on all of them."""
        return across_ranks(batch["present"].sum(), dist.ReduceOp.MAX)

    def backward(self, batch):
        total = node_losses(self.ddp, batch).sum()
        (total / self.normalizer(batch)).backward()


def step(model, shard, rank):
    NodeTrainer(model).backward(shard)


case = Case(model=GraphNet, batch=proteins, loss=loss, layout="1x2")
