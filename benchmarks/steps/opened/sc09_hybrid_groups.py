"""FSDP1 with HYBRID_SHARD over process groups that the launcher makes: shards stay inside a node."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ddp_equivalence import Case


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.gate = nn.Linear(size, size)

    def forward(self, states):
        return states + torch.sigmoid(self.gate(states)) * self.linear(states)


def build():
    return nn.Sequential(nn.Linear(6, 10), Layer(10), Layer(10), nn.Linear(10, 3))


def examples(generator):
    return {
        "inputs": torch.randn(16, 6, generator=generator),
        "targets": torch.randn(16, 3, generator=generator),
    }


def loss(model, batch):
    return nn.functional.smooth_l1_loss(model(batch["inputs"]), batch["targets"])


class Groups:
    """Process groups of a job with ``nodes`` nodes of ``per_node`` ranks."""

    def __init__(self, nodes, per_node, rank):
        self.by_node = [
            [node * per_node + local for local in range(per_node)] for node in range(nodes)
        ]
        self.by_local_rank = [
            [node * per_node + local for node in range(nodes)] for local in range(per_node)
        ]
        self.rank = rank

    def new(self, partition):
        """The group of this rank. All ranks must call this with the same partition."""
        groups = [dist.new_group(ranks) for ranks in partition]
        return next(g for g, ranks in zip(groups, partition, strict=True) if self.rank in ranks)

    def hybrid(self):
        sharding = self.new(self.by_node)
        replication = self.new(self.by_node)
        return sharding, replication


wrap = functools.partial(
    FSDP,
    sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    auto_wrap_policy=ModuleWrapPolicy({Layer}),
    use_orig_params=True,
)


def step(model, shard, rank):
    groups = Groups(rank.nodes, rank.local_world_size, rank.rank)
    fsdp = wrap(model, process_group=groups.hybrid(), device_id=torch.device("cpu"))
    loss(fsdp, shard).backward()
    gradients = {}
    with FSDP.summon_full_params(fsdp, with_grads=True):
        for name, parameter in fsdp.named_parameters():
            gradients[name.replace("_fsdp_wrapped_module.", "")] = parameter.grad.clone()
    return gradients


case = Case(model=build, batch=examples, loss=loss, layout="2x2")
