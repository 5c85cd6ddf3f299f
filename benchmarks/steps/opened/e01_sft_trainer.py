"""Supervised fine-tuning of a small decoder on chats and plain documents.

The loss is normalised per token, over the whole optimizer step: all GPUs and all micro-batches.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

IGNORE = -100


@dataclass(frozen=True)
class SFTArguments:
    vocab_size: int = 53
    hidden: int = 24
    heads: int = 2
    layers: int = 2
    seq_len: int = 12
    per_device_train_batch_size: int = 2


ARGS = SFTArguments()


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, args=ARGS):
        super().__init__()
        self.tokens = nn.Embedding(args.vocab_size, args.hidden)
        self.positions = nn.Embedding(args.seq_len, args.hidden)
        self.blocks = nn.ModuleList(Block(args.hidden, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.hidden)

    def forward(self, input_ids):
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


def make_batch(generator):
    """Chats hide their prompt; every third row is a plain document, of which all counts."""
    rows = 16
    ids = torch.randint(0, ARGS.vocab_size, (rows, ARGS.seq_len), generator=generator)
    prompt = torch.randint(1, 6, (rows, 1), generator=generator)
    prompt[::3] = 0
    length = torch.randint(8, ARGS.seq_len + 1, (rows, 1), generator=generator)
    where = torch.arange(ARGS.seq_len).expand(rows, -1)
    return {"input_ids": ids, "labels": ids.masked_fill((where < prompt) | (where >= length), IGNORE)}


def causal_lm_loss(logits, labels, reduction="mean"):
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction=reduction)


def loss(model, batch):
    return causal_lm_loss(model(batch["input_ids"]), batch["labels"])


case = Case(model=Decoder, batch=make_batch, loss=loss, layout="2x2")


class SFTTrainer:
    def __init__(self, model, args):
        self.args = args
        self.model = DDP(model)

    def micro_batches(self, batch):
        size = self.args.per_device_train_batch_size
        pieces = {key: value.split(size) for key, value in batch.items()}
        return [dict(zip(pieces, values)) for values in zip(*pieces.values())]

    def num_items_in_batch(self, micro_batches):
        count = sum((micro["labels"] != IGNORE).sum() for micro in micro_batches)
        dist.all_reduce(count)
        return count

    def compute_loss(self, micro, num_items):
        total = causal_lm_loss(self.model(micro["input_ids"]), micro["labels"], reduction="sum")
        return total / num_items * dist.get_world_size()

    def training_step(self, batch):
        micro_batches = self.micro_batches(batch)
        num_items = self.num_items_in_batch(micro_batches)
        for number, micro in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with nullcontext() if last else self.model.no_sync():
                self.compute_loss(micro, num_items).backward()


def step(model, shard, rank):
    SFTTrainer(model, ARGS).training_step(shard)
