"""FSDP1, HYBRID_SHARD with process groups made by hand (this trainer predates device meshes)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import always_wrap_policy

from ddp_equivalence import Case


def build():
    return nn.Sequential(
        nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 4)
    )


def batch(generator):
    return (
        torch.randn(16, 6, generator=generator),
        torch.randint(0, 4, (16,), generator=generator),
    )


def loss(model, batch):
    features, labels = batch
    return F.cross_entropy(model(features), labels)


def my_group(lists, rank):
    """new_group must be called by everyone for every group, in the same order."""
    mine = None
    for ranks in lists:
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    return mine


def hybrid_groups(rank):
    world, per_node = rank.world_size, rank.local_world_size
    shard_lists = [list(range(start, start + per_node)) for start in range(0, world, per_node)]
    replica_lists = [list(range(i * per_node, (i + 1) * per_node)) for i in range(rank.nodes)]
    return my_group(shard_lists, rank.rank), my_group(replica_lists, rank.rank)


def gradients(fsdp):
    with FSDP.summon_full_params(fsdp, with_grads=True):
        return {
            name.replace("_fsdp_wrapped_module.", ""): p.grad.clone()
            for name, p in fsdp.named_parameters()
        }


def step(model, shard, rank):
    intra, inter = hybrid_groups(rank)
    fsdp = FSDP(
        model,
        process_group=(intra, inter),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=always_wrap_policy,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        forward_prefetch=True,
    )
    loss(fsdp, shard).backward()
    return gradients(fsdp)


case = Case(model=build, batch=batch, loss=loss, layout="2x2")
