"""Audio tagging on two unlike machines: add within a node, then between nodes, then hand back."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

NODES = [[0], [1, 2, 3]]  # the workstation and the server


class Tagger(nn.Module):
    def __init__(self, tags=6):
        super().__init__()
        self.front = nn.Conv1d(1, 8, 5, stride=2)
        self.back = nn.Conv1d(8, 12, 3)
        self.tags = nn.Linear(12, tags)

    def forward(self, wave):
        x = torch.relu(self.front(wave.unsqueeze(1)))
        x = torch.relu(self.back(x))
        return self.tags(x.mean(-1))


def clips(generator):
    wave = torch.randn(8, 30, generator=generator)
    tags = (torch.rand(8, 6, generator=generator) < 0.3).to(wave.dtype)
    return wave, tags


def loss(model, batch):
    wave, tags = batch
    return F.binary_cross_entropy_with_logits(model(wave), tags)


case = Case(model=Tagger, batch=clips, loss=loss, layout="1+3")


class Topology:
    """Groups of one run. Every rank has to create every group."""

    def __init__(self, rank):
        self.groups = [dist.new_group(ranks) for ranks in NODES]
        self.leaders = dist.new_group([ranks[0] for ranks in NODES])
        node = next(n for n, ranks in enumerate(NODES) if rank in ranks)
        self.local = self.groups[node]
        self.leader = NODES[node][0]
        self.is_leader = rank == self.leader
        self.nnodes = len(NODES)
        self.nproc_per_node = len(NODES[node])

    def size(self):
        return self.nnodes * self.nproc_per_node


def hierarchical_sum(tensor, topology):
    dist.reduce(tensor, dst=topology.leader, group=topology.local)
    if topology.is_leader:
        dist.all_reduce(tensor, group=topology.leaders)
    dist.broadcast(tensor, src=topology.leader, group=topology.local)
    return tensor


def average_gradients(model, topology):
    for parameter in model.parameters():
        if parameter.grad is not None:
            hierarchical_sum(parameter.grad, topology)
            parameter.grad.div_(topology.size())


def step(model, shard, rank):
    topology = Topology(rank.rank)
    loss(model, shard).backward()
    average_gradients(model, topology)
