"""Hybrid sharding: reduce-scatter inside the node, all-reduce between the nodes, gather again."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

RANKS_PER_NODE, EXAMPLES = 2, 16


def build_model():
    return nn.Sequential(nn.Linear(7, 10), nn.ELU(), nn.Linear(10, 6), nn.ELU(), nn.Linear(6, 3))


def loss(model, batch):
    return F.smooth_l1_loss(model(batch["inputs"]), batch["targets"])


def make_batch(generator):
    return {
        "inputs": torch.randn(EXAMPLES, 7, generator=generator),
        "targets": torch.randn(EXAMPLES, 3, generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="2x2")


class HybridGroups:
    """The shards of a replica lie in one node; equal shards of different nodes are replicas.

    Every rank has to take part in the creation of every group, also of those it is not in.
    """

    def __init__(self, rank, world_size, per_node):
        for first in range(0, world_size, per_node):
            members = list(range(first, first + per_node))
            group = dist.new_group(members)
            if rank in members:
                self.shard = group
        for local_rank in range(per_node):
            members = list(range(local_rank, world_size, per_node))
            self.replicate = dist.new_group(members)


class HybridShardedGradients:
    def __init__(self, module, groups):
        self.parameters = list(module.parameters())
        self.groups = groups
        self.world_size = dist.get_world_size()
        self.shards = dist.get_world_size(groups.shard)
        self.numel = sum(p.numel() for p in self.parameters)
        self.padded = -(-self.numel // self.shards) * self.shards

    def flatten(self):
        flat = self.parameters[0].new_zeros(self.padded)
        flat[: self.numel] = torch.cat([p.grad.flatten() for p in self.parameters])
        return flat

    def reduce(self):
        """The mean over all ranks of this rank's shard."""
        pieces = list(self.flatten().chunk(self.shards))
        shard = torch.empty_like(pieces[0])
        dist.reduce_scatter(shard, pieces, group=self.groups.shard)
        dist.all_reduce(shard, group=self.groups.replicate)
        return shard.div_(self.world_size)

    def unshard(self, shard):
        pieces = [torch.empty_like(shard) for _ in range(self.shards)]
        dist.all_gather(pieces, shard, group=self.groups.shard)
        flat = torch.cat(pieces)[: self.numel]
        for parameter, grad in zip(
            self.parameters, flat.split([p.numel() for p in self.parameters])
        ):
            parameter.grad.copy_(grad.view_as(parameter))


def step(model, shard, rank):
    groups = HybridGroups(rank.rank, rank.world_size, RANKS_PER_NODE)
    gradients = HybridShardedGradients(model, groups)
    loss(model, shard).backward()
    gradients.unshard(gradients.reduce())
