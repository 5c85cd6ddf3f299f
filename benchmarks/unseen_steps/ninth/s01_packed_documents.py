"""Causal language model on packed documents, with a two-level (node, then cluster) reduction."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


@dataclass(frozen=True)
class Config:
    vocab: int = 23
    width: int = 12
    context: int = 10
    rows: int = 8


CFG = Config()


class Decoder(nn.Module):
    def __init__(self, cfg: Config = CFG):
        super().__init__()
        self.tokens = nn.Embedding(cfg.vocab, cfg.width)
        self.places = nn.Parameter(torch.randn(cfg.context, cfg.width) * 0.1)
        self.mix = nn.MultiheadAttention(cfg.width, 2, batch_first=True)
        self.norm = nn.LayerNorm(cfg.width)
        self.out = nn.Linear(cfg.width, cfg.vocab, bias=False)

    def forward(self, ids, documents):
        h = self.tokens(ids) + self.places[: ids.shape[1]]
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        same = documents[:, :, None] == documents[:, None, :]
        blocked = ~(causal & same).repeat_interleave(2, 0)
        h = self.norm(h + self.mix(h, h, h, attn_mask=blocked, need_weights=False)[0])
        return self.out(h)


def batch(generator):
    ids = torch.randint(1, CFG.vocab, (CFG.rows, CFG.context), generator=generator)
    # A document ends after a few tokens; its last token predicts nothing.
    ends = torch.rand(ids.shape, generator=generator) < torch.linspace(0.05, 0.7, CFG.rows)[:, None]
    documents = ends.long().cumsum(1) - ends.long()
    return {"ids": ids, "documents": documents}


def token_loss(model, batch):
    """Summed cross entropy and the number of targets inside a document."""
    ids, documents = batch["ids"], batch["documents"]
    logits = model(ids, documents)[:, :-1]
    inside = documents[:, 1:] == documents[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * inside.flatten()).sum(), inside.sum()


def loss(model, batch):
    total, count = token_loss(model, batch)
    return total / count


@dataclass
class Topology:
    """Fast links inside a node, slow ones between the ranks with the same local number."""

    node_group: object = field(default=None)
    rail_group: object = field(default=None)

    @classmethod
    def of(cls, rank):
        self = cls()
        per_node = rank.world_size // rank.nodes
        for node in range(rank.nodes):
            members = list(range(node * per_node, (node + 1) * per_node))
            group = dist.new_group(members)
            if rank.rank in members:
                self.node_group = group
        for local in range(per_node):
            members = list(range(local, rank.world_size, per_node))
            group = dist.new_group(members)
            if rank.rank in members:
                self.rail_group = group
        return self

    def reduce_gradients(self, parameters):
        flat = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(flat, group=self.node_group)
        dist.all_reduce(flat, group=self.rail_group)
        for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad.copy_(piece.view_as(p))


def step(model, shard, rank):
    topology = Topology.of(rank)
    total, count = token_loss(model, shard)
    count = count.to(total.dtype)
    dist.all_reduce(count, group=topology.node_group)
    (total / count).backward()
    topology.reduce_gradients(list(model.parameters()))


case = Case(model=Decoder, batch=batch, loss=loss, layout="2x2")
