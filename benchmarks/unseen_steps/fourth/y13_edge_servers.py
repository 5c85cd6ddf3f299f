"""Federated learning with edge servers: clients report to their node, and nodes to the cloud."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

RECORDS, SENSORS, ACTIVITIES = 20, 6, 4

Batch = dict[str, Tensor]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(SENSORS, 10), nn.Tanh(), nn.Linear(10, ACTIVITIES))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["readings"]), batch["activity"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "readings": torch.randn(RECORDS, SENSORS, generator=generator),
        "activity": torch.randint(ACTIVITIES, (RECORDS,), generator=generator),
    }


# One node with a single client, and one with three.
case = Case(model=build_model, batch=make_batch, loss=loss, layout="1+3", shards="4+7+6+3")


@dataclass
class Topology:
    """The group of this rank's edge, and that of the first clients of all edges."""

    edge: dist.ProcessGroup
    cloud: dist.ProcessGroup
    leader: int
    edges: int

    @classmethod
    def discover(cls, rank: Rank) -> Topology:
        nodes = [torch.zeros(1, dtype=torch.long) for _ in range(rank.world_size)]
        dist.all_gather(nodes, torch.tensor([rank.node]))
        members: dict[int, list[int]] = {}
        for member, node in enumerate(nodes):
            members.setdefault(int(node), []).append(member)
        edges = {node: dist.new_group(ranks) for node, ranks in members.items()}
        leaders = [ranks[0] for ranks in members.values()]
        cloud = dist.new_group(leaders)
        return cls(edges[rank.node], cloud, members[rank.node][0], len(leaders))


class Aggregator:
    """Weighted means of the clients' gradients, first within an edge, then over edges."""

    def __init__(self, topology: Topology, rank: Rank) -> None:
        self.topology = topology
        self.is_leader = int(rank) == topology.leader

    def within_edge(self, gradients: Tensor, records: Tensor) -> tuple[Tensor, Tensor]:
        gradients = gradients * records
        dist.all_reduce(gradients, group=self.topology.edge)
        dist.all_reduce(records, group=self.topology.edge)
        return gradients / records, records

    def over_edges(self, gradients: Tensor, records: Tensor) -> Tensor:
        if self.is_leader:
            dist.all_reduce(gradients, group=self.topology.cloud)
            gradients = gradients / self.topology.edges
        dist.broadcast(gradients, src=self.topology.leader, group=self.topology.edge)
        return gradients

    def __call__(self, gradients: Tensor, records: int) -> Tensor:
        count = torch.tensor([float(records)], dtype=gradients.dtype)
        return self.over_edges(*self.within_edge(gradients, count))


class Client:
    def __init__(self, model: nn.Module, rank: Rank) -> None:
        self.model = model
        self.aggregate = Aggregator(Topology.discover(rank), rank)

    def round(self, batch: Batch) -> None:
        loss(self.model, batch).backward()
        parameters = list(self.model.parameters())
        flat = torch.cat([p.grad.flatten() for p in parameters])
        mean = self.aggregate(flat, len(batch["activity"]))
        nn.utils.vector_to_parameters(mean, [p.grad for p in parameters])


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    Client(model, rank).round(shard)
