"""Two-level averaging: inside each node first, then between the leaders of the nodes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


def build_model():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model, batch):
    return F.cross_entropy(model(batch["inputs"]), batch["classes"])


def make_batch(generator):
    return {
        "inputs": torch.randn(12, 5, generator=generator),
        "classes": torch.randint(0, 3, (12,), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1+2")


class Topology:
    """The ranks of every node, and the process groups made of them."""

    def __init__(self, rank):
        node_of = [None] * rank.world_size
        dist.all_gather_object(node_of, rank.node)
        self.members = [
            [r for r, node in enumerate(node_of) if node == n] for n in range(rank.nodes)
        ]
        groups = [dist.new_group(ranks) for ranks in self.members]
        self.node_group = groups[rank.node]
        self.leader = self.members[rank.node][0]
        self.leaders = dist.new_group([ranks[0] for ranks in self.members])


def hierarchical_mean(flat, rank, topology):
    dist.all_reduce(flat, group=topology.node_group)
    flat /= rank.local_world_size
    if rank == topology.leader:
        dist.all_reduce(flat, group=topology.leaders)
        flat /= rank.nodes
    dist.broadcast(flat, src=topology.leader, group=topology.node_group)


def flatten(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten_into(flat, tensors):
    start = 0
    for t in tensors:
        t.copy_(flat[start : start + t.numel()].view_as(t))
        start += t.numel()


def step(model, shard, rank):
    topology = Topology(rank)
    model.zero_grad()
    loss(model, shard).backward()
    gradients = [p.grad for p in model.parameters()]
    flat = flatten(gradients)
    hierarchical_mean(flat, rank, topology)
    unflatten_into(flat, gradients)
