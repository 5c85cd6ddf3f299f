"""Node classification with a two-layer GCN; a rank loads the neighbourhood of its own seeds."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

NODES, FEATURES, CLASSES, SEEDS, FRIENDS = 30, 6, 4, 16, 26


def gcn_norm(edge_index, num_nodes: int):
    """The weight of every edge: one over the root of the product of both degrees."""
    source, target = edge_index
    degree = torch.zeros(num_nodes, dtype=torch.float64)
    degree.index_add_(0, target, torch.ones(target.shape[0], dtype=torch.float64))
    inv_sqrt = degree.clamp(min=1).rsqrt()
    return inv_sqrt[source] * inv_sqrt[target]


class GCNConv(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.lin = nn.Linear(in_features, out_features)

    def forward(self, x, edge_index, edge_weight):
        source, target = edge_index
        messages = self.lin(x)[source] * edge_weight.unsqueeze(1)
        out = torch.zeros(x.shape[0], messages.shape[1], dtype=messages.dtype)
        return out.index_add(0, target, messages)


class GCN(nn.Module):
    def __init__(self, hidden: int = 10) -> None:
        super().__init__()
        self.first = GCNConv(FEATURES, hidden)
        self.second = GCNConv(hidden, CLASSES)

    def forward(self, x, edge_index, edge_weight):
        x = torch.relu(self.first(x, edge_index, edge_weight))
        return self.second(x, edge_index, edge_weight)


def k_hop_subgraph(seeds, hops: int, edge_index, num_nodes: int):
    """Nodes and edges that the outputs of the seeds depend on."""
    reached = torch.zeros(num_nodes, dtype=torch.bool)
    reached[seeds] = True
    edge_mask = torch.zeros(edge_index.shape[1], dtype=torch.bool)
    for _ in range(hops):
        edge_mask |= reached[edge_index[1]]
        reached[edge_index[0, edge_mask]] = True
    return reached.nonzero().squeeze(1), edge_mask


class NeighbourLoader:
    def __init__(self, batch, hops: int = 2) -> None:
        self.x, self.edge_index = batch["x"], batch["edge_index"]
        self.hops = hops

    def load(self, seeds):
        num_nodes = self.x.shape[0]
        nodes, edge_mask = k_hop_subgraph(seeds, self.hops, self.edge_index, num_nodes)
        position = torch.full((num_nodes,), -1)
        position[nodes] = torch.arange(nodes.shape[0])
        edge_index = position[self.edge_index[:, edge_mask]]
        edge_weight = gcn_norm(edge_index, nodes.shape[0])
        return self.x[nodes], edge_index, edge_weight, position[seeds]


def make_batch(generator):
    ring = torch.stack([torch.arange(NODES), (torch.arange(NODES) + 1) % NODES])
    friends = torch.randint(NODES, (2, FRIENDS), generator=generator)
    friends = friends[:, friends[0] != friends[1]]
    edges = torch.cat([ring, friends], dim=1)
    loops = torch.arange(NODES).expand(2, -1)
    return {
        "seeds": torch.randperm(NODES, generator=generator)[:SEEDS],
        "labels": torch.randint(CLASSES, (SEEDS,), generator=generator),
        "x": torch.randn(NODES, FEATURES, generator=generator),
        "edge_index": torch.cat([edges, edges.flip(0), loops], dim=1),
    }


def full_graph_loss(model, batch):
    edge_weight = gcn_norm(batch["edge_index"], batch["x"].shape[0])
    out = model(batch["x"], batch["edge_index"], edge_weight)
    return F.cross_entropy(out[batch["seeds"]], batch["labels"])


case = Case(
    model=GCN,
    batch=make_batch,
    loss=full_graph_loss,
    layout="1x2",
    batch_dims={"x": None, "edge_index": None},
)


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    x, edge_index, edge_weight, rows = NeighbourLoader(shard).load(shard["seeds"])
    out = ddp(x, edge_index, edge_weight)
    F.cross_entropy(out[rows], shard["labels"]).backward()
