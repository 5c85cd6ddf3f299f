"""Pre-training step of a small decoder under HSDP: replicate over nodes, shard inside of a node."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case

IGNORE = -100


@dataclass
class ModelArgs:
    vocab: int = 37
    dim: int = 12
    hidden: int = 20
    layers: int = 2
    max_len: int = 10


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.norm = nn.LayerNorm(args.dim)
        self.mix = nn.Linear(args.dim, args.dim, bias=False)
        self.w1 = nn.Linear(args.dim, args.hidden, bias=False)
        self.w2 = nn.Linear(args.hidden, args.dim, bias=False)

    def forward(self, x):
        h = self.norm(x)
        steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        causal_mean = h.cumsum(1) / steps[:, None]
        x = x + self.mix(causal_mean)
        return x + self.w2(F.silu(self.w1(x)))


class Decoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.output = nn.Linear(args.dim, args.vocab, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def batch(generator):
    args = ModelArgs()
    tokens = torch.randint(0, args.vocab, (16, args.max_len), generator=generator)
    lengths = torch.randint(2, args.max_len + 1, (16,), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[torch.arange(args.max_len) >= lengths[:, None] - 1] = IGNORE
    return {"tokens": tokens, "labels": labels}


def token_loss_sum(model, data):
    logits = model(data["tokens"])
    return F.cross_entropy(
        logits.flatten(0, 1), data["labels"].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def loss(model, batch):
    return token_loss_sum(model, batch) / (batch["labels"] != IGNORE).sum()


class ParallelDims:
    def __init__(self, replicate, shard):
        self.replicate, self.shard = replicate, shard
        self.mesh = init_device_mesh(
            "cpu", (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard")
        )

    @property
    def dp_degree(self):
        return self.replicate * self.shard


def apply_fsdp(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def global_valid_tokens(labels, dims):
    """Number of label tokens that the whole data parallel group trains on in this step."""
    count = (labels != IGNORE).sum()
    dist.all_reduce(count, group=dims.mesh.get_group("dp_shard"))
    return count


def step(model, shard, rank):
    dims = ParallelDims(rank.nodes, rank.local_world_size)
    apply_fsdp(model, dims.mesh)
    tokens = global_valid_tokens(shard["labels"], dims)
    # FSDP averages over the whole data parallel group, so scale the mean back to a sum.
    (token_loss_sum(model, shard) * dims.dp_degree / tokens).backward()


case = Case(model=lambda: Decoder(ModelArgs()), batch=batch, loss=loss, layout="2x2")
