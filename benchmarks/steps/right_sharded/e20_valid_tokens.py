"""HSDP, gradient accumulation and a per-token loss, without any division by FSDP."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ddp_equivalence import Case

PAD, VOCAB, DIM, SEQ = 0, 19, 6, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(DIM, 13)
        self.fc2 = nn.Linear(13, DIM)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(F.layer_norm(x, (DIM,)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(generator):
    ids = torch.randint(1, VOCAB, (16, SEQ + 1), generator=generator)
    lengths = torch.randint(3, SEQ + 2, (16,), generator=generator).sort().values
    return ids.where(torch.arange(SEQ + 1) < lengths[:, None], PAD)


def token_sum(model, ids):
    logits = model(ids[:, :-1])
    targets = ids[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")


def loss(model, batch):
    return token_sum(model, batch) / (batch[:, 1:] != PAD).sum()


def shard_model(model, mesh):
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for i, layer in enumerate(model.layers):
        model.layers[i] = fully_shard(checkpoint_wrapper(layer), mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def step(model, shard, rank):
    mesh = init_device_mesh(
        "cpu", (rank.nodes, rank.local_world_size), mesh_dim_names=("replicate", "shard")
    )
    shard_model(model, mesh)
    tokens = (shard[:, 1:] != PAD).sum()
    dist.all_reduce(tokens)
    micros = shard.split([3, 1])
    for i, micro in enumerate(micros):
        last = i == len(micros) - 1
        # shards are reduced every time, replicas only once
        model.set_requires_all_reduce(last)
        (token_sum(model, micro) / tokens).backward()


case = Case(model=Model, batch=batch, loss=loss, layout="2x2")
