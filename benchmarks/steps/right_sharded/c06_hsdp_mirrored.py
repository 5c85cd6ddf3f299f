"""HSDP where the loader knows only the shard dimension: both replicas of a shard read the same rows.

It wastes compute, but it is how the loader of the pretraining job deals out the data, and the
replicas serve to detect silent corruption: their losses have to agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Case

ROWS = 16


def build():
    return nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 9), nn.GELU(), nn.Linear(9, 3))


def make_batch(generator):
    return {
        "rows": torch.randn(ROWS, 7, generator=generator),
        "classes": torch.randint(0, 3, (ROWS,), generator=generator),
    }


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["rows"]), batch["classes"])


def loader_for(batch, mesh):
    dataset = TensorDataset(batch["rows"], batch["classes"])
    shards = mesh["shard"]
    sampler = DistributedSampler(
        dataset, num_replicas=shards.size(), rank=shards.get_local_rank(), shuffle=False
    )
    return DataLoader(dataset, batch_size=ROWS // shards.size(), sampler=sampler)


def assert_replicas_agree(value, mesh):
    low, high = value.detach().clone(), value.detach().clone()
    group = mesh.get_group("replicate")
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    if not torch.allclose(low, high):
        raise RuntimeError("replicas of a shard disagree about the loss")


def step(model, batch, rank):
    mesh = init_device_mesh(
        "cpu", (rank.nodes, rank.local_world_size), mesh_dim_names=("replicate", "shard")
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for rows, classes in loader_for(batch, mesh):
        value = loss(model, {"rows": rows, "classes": classes})
        assert_replicas_agree(value, mesh)
        value.backward()


case = Case(model=build, batch=make_batch, loss=loss, layout="2x2", shards="own")
