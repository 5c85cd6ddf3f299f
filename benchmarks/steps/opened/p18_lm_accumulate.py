"""A byte-level language model that accumulates gradients over micro-batches and syncs once."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass
class Config:
    vocab: int = 32
    width: int = 12
    context: int = 10
    micro_batches: int = 4


CONFIG = Config()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


class LanguageModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.places = nn.Parameter(0.1 * torch.randn(config.context, config.width))
        self.blocks = nn.ModuleList(Block(config.width) for _ in range(2))
        self.head = nn.Linear(config.width, config.vocab)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    logits = model(batch["text"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["text"][:, 1:].flatten())


def micro_batches(shard, count):
    return [{"text": part} for part in shard["text"].chunk(count)]


def step(model, shard, rank):
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parts = micro_batches(shard, CONFIG.micro_batches)
    for index, part in enumerate(parts):
        # one exchange per step is enough
        quiet = ddp.no_sync() if index % len(parts) else nullcontext()
        with quiet:
            (loss(ddp, part) / len(parts)).backward()


case = Case(
    model=lambda: LanguageModel(CONFIG),
    batch=lambda g: {"text": torch.randint(0, CONFIG.vocab, (16, CONFIG.context), generator=g)},
    loss=loss,
    layout="1x2",
)
