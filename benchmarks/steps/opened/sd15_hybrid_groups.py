"""HYBRID_SHARD with process groups of our own, made from the topology of the job."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass(frozen=True)
class Topology:
    nodes: int
    ranks_per_node: int

    @classmethod
    def of(cls, rank):
        return cls(rank.nodes, rank.local_world_size)

    @property
    def world_size(self):
        return self.nodes * self.ranks_per_node

    def shard_ranks(self):
        """The ranks that hold the shards of one copy of the model: those of a node."""
        for node in range(self.nodes):
            yield [node * self.ranks_per_node + local for local in range(self.ranks_per_node)]

    def replicate_ranks(self):
        """The ranks that hold the same shard, one of each node."""
        for local in range(self.ranks_per_node):
            yield [local * self.nodes + node for node in range(self.nodes)]


class GroupRegistry:
    def __init__(self, topology: Topology, rank: int):
        self.rank = rank
        self.shard = self._mine(topology.shard_ranks())
        self.replicate = self._mine(topology.replicate_ranks())

    def _mine(self, all_ranks):
        # every rank takes part in making every group
        groups = [(ranks, dist.new_group(ranks)) for ranks in all_ranks]
        return next(group for ranks, group in groups if self.rank in ranks)


class PatchClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, kernel_size=2, stride=2)
        self.mixer = nn.Sequential(nn.Linear(9, 16), nn.GELU(), nn.Linear(16, 9))
        self.norm = nn.LayerNorm(9)
        self.head = nn.Linear(8, 4)

    def forward(self, images):
        tokens = self.patches(images).flatten(2)
        tokens = tokens + self.mixer(self.norm(tokens))
        return self.head(tokens.amax(-1))


class HybridPlugin:
    def __init__(self, groups: GroupRegistry):
        self.groups = groups

    def prepare(self, model):
        def policy(module, recurse, nonwrapped_numel):
            return size_based_auto_wrap_policy(
                module, recurse, nonwrapped_numel, min_num_params=200
            )

        return FSDP(
            model,
            process_group=(self.groups.shard, self.groups.replicate),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            auto_wrap_policy=policy,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )

    def gradients(self, model):
        prefix = "_fsdp_wrapped_module."
        with FSDP.summon_full_params(model, with_grads=True):
            return {
                name.replace(prefix, ""): parameter.grad.clone()
                for name, parameter in model.named_parameters()
            }


def make_batch(generator):
    return {
        "image": torch.randn(16, 1, 6, 6, generator=generator),
        "label": torch.randint(0, 4, (16,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=0.1)


def step(model, shard, rank):
    plugin = HybridPlugin(GroupRegistry(Topology.of(rank), rank.rank))
    sharded = plugin.prepare(model)
    loss(sharded, shard).backward()
    return plugin.gradients(sharded)


case = Case(model=PatchClassifier, batch=make_batch, loss=loss, layout="2x2")
