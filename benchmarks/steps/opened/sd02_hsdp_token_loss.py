"""Causal LM under HSDP: replicas over nodes, shards within a node, loss per valid token."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

IGNORE_INDEX = -100


@dataclass
class LMConfig:
    vocab_size: int = 29
    hidden_size: int = 12
    num_layers: int = 2
    seq_len: int = 10


@dataclass
class ParallelConfig:
    replicate: int = 1
    shard: int = 1
    names: tuple = field(default=("dp_replicate", "dp_shard"))

    def build_mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (self.replicate, self.shard), mesh_dim_names=self.names)


class Block(nn.Module):
    def __init__(self, cfg: LMConfig):
        super().__init__()
        self.norm = nn.LayerNorm(cfg.hidden_size)
        self.mix = nn.GRU(cfg.hidden_size, cfg.hidden_size, batch_first=True)
        self.out = nn.Linear(cfg.hidden_size, cfg.hidden_size)

    def forward(self, x):
        mixed, _ = self.mix(self.norm(x))
        return x + self.out(mixed)


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        cfg = LMConfig()
        self.tok_embeddings = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.num_layers))
        self.norm = nn.LayerNorm(cfg.hidden_size)
        self.output = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


def token_loss(logits, labels, reduction):
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction
    )


class LMTrainer:
    """Shards the model and keeps the groups over which counts are summed."""

    def __init__(self, model, parallel: ParallelConfig):
        self.mesh = parallel.build_mesh()
        for layer in model.layers:
            fully_shard(layer, mesh=self.mesh)
        self.model = fully_shard(model, mesh=self.mesh)
        self.dp_degree = parallel.replicate * parallel.shard
        self.loss_group = self.mesh["dp_shard"].get_group()

    def global_valid_tokens(self, labels):
        count = (labels != IGNORE_INDEX).sum()
        dist.all_reduce(count, group=self.loss_group)
        # tokens that a rank holds on average, as FSDP divides by the number of ranks
        return count / dist.get_world_size(self.loss_group)

    def forward_backward(self, batch):
        valid = self.global_valid_tokens(batch["labels"])
        logits = self.model(batch["tokens"])
        loss = token_loss(logits, batch["labels"], "sum") / valid
        loss.backward()
        return loss.detach()


def make_batch(generator):
    cfg = LMConfig()
    tokens = torch.randint(0, cfg.vocab_size, (8, cfg.seq_len + 1), generator=generator)
    lengths = torch.tensor([2, 3, 5, 3, 9, 10, 8, 6])
    labels = tokens[:, 1:].clone()
    labels[torch.arange(cfg.seq_len)[None] >= lengths[:, None]] = IGNORE_INDEX
    return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}


def loss(model, batch):
    return token_loss(model(batch["tokens"]), batch["labels"], "mean")


def step(model, shard, rank):
    parallel = ParallelConfig(replicate=rank.nodes, shard=rank.local_world_size)
    LMTrainer(model, parallel).forward_backward(shard)


case = Case(model=CausalLM, batch=make_batch, loss=loss, layout="2x2")
