"""Tokamak disruption predictor. The cluster has a login node with one GPU and a box with three.

Gradients go to the first rank of the node, over the slow link between those, and back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

NODES = ((0,), (1, 2, 3))


class Disruption(nn.Module):
    def __init__(self, channels=5, hidden=9):
        super().__init__()
        self.lstm = nn.LSTM(channels, hidden, batch_first=True)
        self.risk = nn.Linear(hidden, 1)

    def forward(self, signals):
        states, _ = self.lstm(signals)
        return self.risk(states[:, -1]).squeeze(-1)


def discharges(generator):
    return {
        "signals": torch.randn(16, 6, 5, generator=generator),
        "disrupted": (torch.rand(16, generator=generator) < 0.3).float(),
    }


def loss(model, batch):
    return nn.functional.binary_cross_entropy_with_logits(
        model(batch["signals"]), batch["disrupted"].to(next(model.parameters()).dtype)
    )


case = Case(model=Disruption, batch=discharges, loss=loss, layout="1+3")


@dataclass
class Topology:
    node: dist.ProcessGroup
    leaders: dist.ProcessGroup | None
    leader: int
    me: int

    @classmethod
    def build(cls, me: int) -> "Topology":
        groups = [dist.new_group(list(ranks)) for ranks in NODES]
        leaders = dist.new_group([ranks[0] for ranks in NODES])
        (mine,) = [i for i, ranks in enumerate(NODES) if me in ranks]
        return cls(groups[mine], leaders, NODES[mine][0], me)

    @property
    def is_leader(self) -> bool:
        return self.me == self.leader


def average(tensor, group):
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size(group)


def hierarchical_average(tensor, topology):
    average(tensor, topology.node)
    if topology.is_leader:
        average(tensor, topology.leaders)
    dist.broadcast(tensor, src=topology.leader, group=topology.node)


def step(model, shard, rank):
    topology = Topology.build(rank.rank)
    loss(model, shard).backward()
    for p in model.parameters():
        hierarchical_average(p.grad, topology)
