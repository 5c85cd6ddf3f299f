"""FSDP1 hybrid sharding on a device mesh: shards lie across the nodes, replicas inside of one.

The links between these nodes are as fast as those inside, and this way each node has all shards.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ddp_equivalence import Case

WIDTH = 7  # odd on purpose: flat parameters need padding


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.outer = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x):
        return x + self.outer(F.elu(self.inner(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.body = nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.body(self.stem(x))).squeeze(-1)


def batch(generator):
    x = torch.randn(16, 5, generator=generator)
    weight = torch.rand(16, generator=generator) + 0.1
    return {"x": x, "y": x.sin().sum(1), "weight": weight}


def loss(model, batch):
    errors = F.huber_loss(model(batch["x"]), batch["y"], reduction="none")
    return (errors * batch["weight"]).mean()


def hybrid_mesh(rank):
    ids = torch.arange(rank.world_size).view(rank.nodes, rank.local_world_size)
    # dim 0 replicates and dim 1 shards
    return DeviceMesh("cpu", ids.t().contiguous(), mesh_dim_names=("replicate", "shard"))


def wrap(model, rank):
    return FSDP(
        model,
        device_mesh=hybrid_mesh(rank),
        sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,
        auto_wrap_policy=ModuleWrapPolicy({Residual}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        limit_all_gathers=False,
    )


def accumulate(fsdp, shard):
    """Two halves of the shard; only the second backward reduces anything."""
    first, second = ({k: v[i::2] for k, v in shard.items()} for i in range(2))
    with fsdp.no_sync():
        (loss(fsdp, first) / 2).backward()
    (loss(fsdp, second) / 2).backward()


def step(model, shard, rank):
    fsdp = wrap(model, rank)
    accumulate(fsdp, shard)
    with FSDP.summon_full_params(fsdp, with_grads=True):
        return {
            name.replace("_fsdp_wrapped_module.", ""): p.grad.clone()
            for name, p in fsdp.named_parameters()
        }


case = Case(model=Model, batch=batch, loss=loss, layout="2x2")
