"""Regression on graphs of unequal size: a rank's graphs are joined to one large graph."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

GRAPHS, NODES, FEATURES, WIDTH = 16, 6, 4, 7


@dataclass
class GraphBatch:
    """Nodes of all graphs in a row; `graph` says to which one each node belongs."""

    x: Tensor
    edges: Tensor
    graph: Tensor
    y: Tensor

    @property
    def num_graphs(self):
        return int(self.graph.max()) + 1


def collate(batch):
    """Drop the empty places of graphs that have fewer than NODES nodes."""
    used = torch.arange(NODES)[None, :] < batch["size"][:, None]
    number = torch.cumsum(used.flatten(), 0).sub(1).view_as(used)
    graph, source, target = batch["adjacency"].nonzero(as_tuple=True)
    kept = used[graph, source] & used[graph, target]
    graph, source, target = graph[kept], source[kept], target[kept]
    edges = torch.stack([number[graph, source], number[graph, target]])
    node_graph = batch["index"].repeat_interleave(batch["size"])
    labels = batch["y"].new_zeros(int(node_graph.max()) + 1)
    labels[node_graph] = batch["y"].repeat_interleave(batch["size"])
    return GraphBatch(batch["x"][used], edges, node_graph, labels)


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.message = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, batch):
        x = self.embed(batch.x)
        source, target = batch.edges
        received = torch.zeros_like(x).index_add(0, target, torch.relu(self.message(x))[source])
        x = torch.relu(x + received)
        pooled = x.new_zeros(batch.num_graphs, WIDTH).index_add(0, batch.graph, x)
        return self.head(pooled).squeeze(-1)


def summed_loss(model, graphs):
    return (model(graphs) - graphs.y).square().sum()


def loss(model, batch):
    return summed_loss(model, collate(batch)) / len(batch["index"])


def make_batch(generator):
    return {
        "index": torch.arange(GRAPHS),
        "size": torch.randint(2, NODES + 1, (GRAPHS,), generator=generator),
        "x": torch.randn(GRAPHS, NODES, FEATURES, generator=generator),
        "adjacency": torch.rand(GRAPHS, NODES, NODES, generator=generator) < 0.4,
        "y": torch.randn(GRAPHS, generator=generator),
    }


case = Case(model=GraphNet, batch=make_batch, loss=loss, layout="1x2", shards="9+7")


def graphs_of_all_ranks(batch):
    count = torch.tensor(len(batch["index"]))
    dist.all_reduce(count)
    return count


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    total = summed_loss(ddp, collate(shard))
    (rank.world_size * total / graphs_of_all_ranks(shard)).backward()
