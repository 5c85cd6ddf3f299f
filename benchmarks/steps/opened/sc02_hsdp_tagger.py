"""Hybrid sharding of a sequence tagger: parameters are sharded in a node, replicated across nodes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case

TAGS = 7
IGNORE = -1


class Tagger(nn.Module):
    def __init__(self, features=9, width=16):
        super().__init__()
        self.project = nn.Linear(features, width)
        self.mix = nn.Conv1d(width, width, kernel_size=3, padding=1)
        self.tag = nn.Linear(width, TAGS)

    def forward(self, frames):
        states = torch.tanh(self.project(frames))
        states = torch.tanh(self.mix(states.transpose(1, 2))).transpose(1, 2)
        return self.tag(states)


def build():
    return Tagger()


def utterances(generator):
    count, frames = 16, 12
    lengths = torch.randint(1, frames + 1, (count,), generator=generator).sort().values
    tags = torch.randint(0, TAGS, (count, frames), generator=generator)
    tags[torch.arange(frames) >= lengths[:, None]] = IGNORE
    return {"frames": torch.randn(count, frames, 9, generator=generator), "tags": tags}


def nll(model, batch, reduction):
    scores = model(batch["frames"]).reshape(-1, TAGS)
    return F.cross_entropy(scores, batch["tags"].reshape(-1), ignore_index=IGNORE, reduction=reduction)


def loss(model, batch):
    return nll(model, batch, "mean")


class HybridTrainer:
    """Owns the mesh, the sharded model and the normalisation of the loss."""

    def __init__(self, model, nodes, per_node):
        self.mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("replicate", "shard"))
        for layer in (model.project, model.mix, model.tag):
            fully_shard(layer, mesh=self.mesh)
        self.model = fully_shard(model, mesh=self.mesh)

    def tokens_per_rank(self, tags):
        """The number of tags that count, averaged over the data-parallel ranks."""
        tokens = (tags != IGNORE).sum().double()
        group = self.mesh.get_group("shard")
        dist.all_reduce(tokens, group=group)
        return tokens / dist.get_world_size(group)

    def backward(self, batch):
        tokens = self.tokens_per_rank(batch["tags"])
        value = nll(self.model, batch, "sum") / tokens
        value.backward()
        return value.detach()


def step(model, shard, rank):
    HybridTrainer(model, rank.nodes, rank.local_world_size).backward(shard)


case = Case(model=build, batch=utterances, loss=loss, layout="2x2")
