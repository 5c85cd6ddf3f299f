"""2-D parallel encoder: tensor and sequence parallel inside a node, FSDP2 between the nodes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass
class EncoderConfig:
    dim: int = 8
    hidden: int = 12
    depth: int = 2
    vocab: int = 17
    classes: int = 3


class FeedForward(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.w1 = nn.Linear(cfg.dim, cfg.hidden, bias=False)
        self.w3 = nn.Linear(cfg.dim, cfg.hidden, bias=False)
        self.w2 = nn.Linear(cfg.hidden, cfg.dim)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.ffn_norm = nn.LayerNorm(cfg.dim)
        self.feed_forward = FeedForward(cfg)

    def forward(self, x):
        return x + self.feed_forward(self.ffn_norm(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        cfg = EncoderConfig()
        self.tok_embeddings = nn.Embedding(cfg.vocab, cfg.dim)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.depth))
        self.norm = nn.LayerNorm(cfg.dim)
        self.output = nn.Linear(cfg.dim, cfg.classes)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h)).mean(1)


class ParallelBuilder:
    """Applies the plan of each layer, then shards what is left over the data-parallel ranks."""

    def __init__(self, rank):
        sizes = (rank.nodes, rank.local_world_size)
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))

    def apply_tp(self, model):
        tp = self.mesh["tp"]
        root_plan = {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, tp, root_plan)
        for layer in model.layers:
            layer_plan = {
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(layer, tp, layer_plan)

    def apply_fsdp(self, model):
        for layer in model.layers:
            fully_shard(layer, mesh=self.mesh["dp"])
        fully_shard(model, mesh=self.mesh["dp"])

    def rows_of_tp_group(self, batch):
        """The ranks of a tensor-parallel group work on the same rows: those of all of them."""
        group = self.mesh["tp"].get_group()
        rows = {}
        for key, mine in batch.items():
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, mine.contiguous(), group=group)
            rows[key] = torch.cat(parts)
        return rows


def make_batch(generator):
    return {
        "tokens": torch.randint(0, 17, (8, 6), generator=generator),
        "labels": torch.randint(0, 3, (8,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]), batch["labels"])


def step(model, shard, rank):
    builder = ParallelBuilder(rank)
    builder.apply_tp(model)
    builder.apply_fsdp(model)
    loss(model, builder.rows_of_tp_group(shard)).backward()


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="2x2")
