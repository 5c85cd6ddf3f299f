"""DDP with a communication hook of two levels: one rank of each node uses the slow links."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

EXAMPLES = 16
NODES = ((0,), (1, 2, 3))  # one rank is left on the first host, which it shares with the loader


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 6, kernel_size=3, padding=1)
        self.proj = nn.Linear(6, 4)

    def forward(self, signal):
        return self.proj(F.gelu(self.conv(signal)).mean(dim=-1))


def loss(model, batch):
    return F.mse_loss(model(batch["signal"]), batch["target"])


def make_batch(generator):
    return {
        "signal": torch.randn(EXAMPLES, 2, 9, generator=generator),
        "target": torch.randn(EXAMPLES, 4, generator=generator),
    }


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="1+3")


@dataclass
class Topology:
    node: dist.ProcessGroup
    leaders: dist.ProcessGroup
    leader: int
    rank: int

    @classmethod
    def create(cls, nodes, rank):
        leaders = dist.new_group([ranks[0] for ranks in nodes])
        for ranks in nodes:
            group = dist.new_group(list(ranks))
            if rank in ranks:
                node, leader = group, ranks[0]
        return cls(node, leaders, leader, rank)

    @property
    def leads(self):
        return self.rank == self.leader


def hierarchical_mean(topology, bucket):
    """Mean inside the node, then between the leaders, who tell the others."""
    flat = bucket.buffer()
    dist.all_reduce(flat, group=topology.node)
    flat.div_(dist.get_world_size(topology.node))
    if topology.leads:
        dist.all_reduce(flat, group=topology.leaders)
        flat.div_(dist.get_world_size(topology.leaders))
    dist.broadcast(flat, src=topology.leader, group=topology.node)
    future = torch.futures.Future()
    future.set_result(flat)
    return future


class Trainer:
    def __init__(self, model, rank):
        self.ddp = DistributedDataParallel(model)
        self.ddp.register_comm_hook(Topology.create(NODES, rank), hierarchical_mean)

    def backward(self, batch):
        loss(self.ddp, batch).backward()


def step(model, shard, rank):
    Trainer(model, rank.rank).backward(shard)
