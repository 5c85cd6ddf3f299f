"""Properties of nodes in a batch of small graphs; a communication hook sums, the loss normalises."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

NODES = 6


class GraphLayer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.others = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, adjacency):
        return self.own(x) + self.others(adjacency @ x)


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([GraphLayer(3, 8), GraphLayer(8, 8), GraphLayer(8, 2)])

    def forward(self, x, adjacency):
        for layer in self.layers[:-1]:
            x = F.elu(layer(x, adjacency))
        return self.layers[-1](x, adjacency)


def graphs(generator):
    sizes = torch.tensor([2, 3, 2, 3, 3, 6, 5, 6, 6, 5])
    real = torch.arange(NODES) < sizes[:, None]
    edges = torch.rand(10, NODES, NODES, generator=generator) < 0.5
    edges = edges & real[:, None] & real[:, :, None]
    return {
        "x": torch.randn(10, NODES, 3, generator=generator),
        "adjacency": edges.float(),
        "real": real,
        "y": torch.randn(10, NODES, 2, generator=generator),
    }


def node_errors(model, batch):
    errors = (model(batch["x"], batch["adjacency"]) - batch["y"]).square().sum(-1)
    return errors * batch["real"]


def loss(model, batch):
    return node_errors(model, batch).sum() / batch["real"].sum()


def summing_hook(state, bucket):
    """All parts are divided by the nodes of all ranks already: nothing to average."""
    buffer = bucket.buffer()
    future = dist.all_reduce(buffer, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, summing_hook)
    nodes = shard["real"].sum()
    dist.all_reduce(nodes)
    mean_nodes = nodes / rank.world_size
    (node_errors(ddp, shard).sum() / mean_nodes).backward()


case = Case(model=GraphNet, batch=graphs, loss=loss, layout="1x2")
