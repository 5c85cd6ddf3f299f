# Self-attention with the heads dealt out over all ranks (no data parallelism on this machine).
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

HEADS, HEAD_DIM, LENGTH, BATCH, VOCAB = 4, 4, 6, 8, 11
DIM = HEADS * HEAD_DIM


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (heads(layer(x), HEADS) for layer in (self.q, self.k, self.v))
        return self.o(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.attention = Attention()
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.lm_head(x + self.attention(self.norm(x)))


def heads(x, n):
    return x.unflatten(-1, (n, HEAD_DIM)).transpose(1, 2)


def merge(x):
    return x.transpose(1, 2).flatten(2)


def next_token_loss(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def loss(model, batch):
    return next_token_loss(model(batch["tokens"]), batch["tokens"])


def make_batch(generator):
    return {"tokens": torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)}


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class ShardedAttention:
    def __init__(self, full, rank, world):
        self.full, self.local = full, HEADS // world
        width = self.local * HEAD_DIM
        self.rows = slice(rank * width, (rank + 1) * width)

    def __call__(self, hidden):
        shared = _Enter.apply(hidden)
        q = heads(F.linear(shared, self.full.q.weight[self.rows]), self.local)
        k = heads(F.linear(shared, self.full.k.weight[self.rows]), self.local)
        v = heads(F.linear(hidden, self.full.v.weight[self.rows]), self.local)
        mixed = merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return _Leave.apply(F.linear(mixed, self.full.o.weight[:, self.rows]))


def assemble_sharded_gradients(attention):
    for parameter in attention.parameters():
        dist.all_reduce(parameter.grad)


def step(model, shard, rank):
    attention = ShardedAttention(model.attention, dist.get_rank(), dist.get_world_size())
    x = model.embed(shard["tokens"])
    x = x + attention(model.norm(x))
    next_token_loss(model.lm_head(x), shard["tokens"]).backward()
    assemble_sharded_gradients(model.attention)


case = Case(model=TinyLM, batch=make_batch, loss=loss, layout="1x2", shards="own")
