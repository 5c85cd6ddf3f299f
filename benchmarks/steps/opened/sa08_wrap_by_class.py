"""Wraps modules by their class, children first, as an auto-wrap policy does."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

VOCABULARY, WIDTH, HEADS, LENGTH = 31, 16, 4, 7


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.norm_2 = nn.RMSNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tokens(ids) + self.positions)))


# Modules of these classes become units of their own.
UNITS = (Block,)


def shard_by_class(model, **options):
    """``modules()`` lists parents first, and fully_shard has to see children first."""
    units = [module for module in model.modules() if isinstance(module, UNITS)]
    for unit in reversed(units):
        fully_shard(unit, **options)
    return model


def next_token_loss(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def some_ids(generator):
    return torch.randint(VOCABULARY, (12, LENGTH + 1), generator=generator)


def step(model, shard, rank):
    sharded = shard_by_class(model, reshard_after_forward=False)
    next_token_loss(sharded, shard).backward()


loss = next_token_loss
case = Case(model=Decoder, batch=some_ids, loss=loss, layout="1x2")
