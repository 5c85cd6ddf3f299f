"""Full-graph node regression: every rank holds all nodes, and its own part of the edges."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

NODES, EDGES, NODE_FEATURES, EDGE_FEATURES, HIDDEN = 9, 24, 5, 3, 8

Graph = dict[str, Tensor]


class Exchange(Protocol):
    def __call__(self, aggregated: Tensor) -> Tensor: ...


def nothing_to_exchange(aggregated: Tensor) -> Tensor:
    return aggregated


class MessageNetwork(nn.Module):
    """One round of message passing along the edges, and an update of every node."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(NODE_FEATURES + EDGE_FEATURES, HIDDEN), nn.Tanh())
        self.update = nn.Linear(NODE_FEATURES + HIDDEN, HIDDEN)
        self.readout = nn.Linear(HIDDEN, 1)

    def forward(self, graph: Graph, exchange: Exchange = nothing_to_exchange) -> Tensor:
        nodes, (source, target) = graph["nodes"], graph["edges"].T
        inputs = torch.cat([nodes[source], graph["edge_features"]], dim=1)
        aggregated = nodes.new_zeros(len(nodes), HIDDEN)
        aggregated = aggregated.index_add(0, target, self.message(inputs))
        aggregated = exchange(aggregated)
        hidden = torch.tanh(self.update(torch.cat([nodes, aggregated], dim=1)))
        return self.readout(hidden).squeeze(1)


def loss(model: nn.Module, graph: Graph) -> Tensor:
    return F.mse_loss(model(graph), graph["node_targets"])


def make_graph(generator: torch.Generator) -> Graph:
    return {
        "nodes": torch.randn(NODES, NODE_FEATURES, generator=generator),
        "node_targets": torch.randn(NODES, generator=generator),
        "edges": torch.randint(NODES, (EDGES, 2), generator=generator),
        "edge_features": torch.randn(EDGES, EDGE_FEATURES, generator=generator),
    }


case = Case(
    model=MessageNetwork,
    batch=make_graph,
    loss=loss,
    layout="1x3",
    batch_dims={"nodes": None, "node_targets": None, "edges": 0, "edge_features": 0},
)


class EdgePartition:
    """Completes what the rank's edges have aggregated with what those of the others have."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.bytes_sent = 0

    def complete(self, partial: Tensor) -> Tensor:
        self.bytes_sent += partial.numel() * partial.element_size()
        total = partial.clone()
        dist.all_reduce(total, group=self.group)
        return total


class GraphTrainer:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.partition = EdgePartition()
        self.model = DistributedDataParallel(model)

    def fit(self, graph: Graph) -> float:
        predictions = self.model(graph, self.partition.complete)
        objective = F.mse_loss(predictions, graph["node_targets"])
        objective.backward()
        return objective.item()


def step(model: nn.Module, shard: Graph, rank: Rank) -> None:
    GraphTrainer(model, rank).fit(shard)
