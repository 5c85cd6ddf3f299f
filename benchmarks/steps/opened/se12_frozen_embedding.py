"""Finetuning with frozen embeddings: fully_shard per block, every block is checkpointed."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from ddp_equivalence import Case

VOCAB, DIM, CLASSES = 40, 12, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.score = nn.Linear(DIM, 1, bias=False)
        self.value = nn.Linear(DIM, DIM)

    def forward(self, x):
        h = self.norm(x)
        pooled = (self.score(h).softmax(1) * self.value(h)).sum(1, keepdim=True)
        return x + torch.tanh(pooled)


class Classifier(nn.Module):
    checkpointing = False

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, CLASSES)
        self.embed.requires_grad_(False)

    def run_block(self, block, x):
        if self.checkpointing:
            return checkpoint(block, x, use_reentrant=True)
        return block(x)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.head(x.mean(1))


def batch(generator):
    return {
        "ids": torch.randint(0, VOCAB, (12, 8), generator=generator),
        "label": torch.randint(0, CLASSES, (12,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["ids"]), batch["label"])


def enable_checkpointing(model):
    model.checkpointing = True
    return model


def parallelize(model):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=False)


def step(model, shard, rank):
    enable_checkpointing(model)
    parallelize(model)
    loss(model, shard).backward()


case = Case(model=Classifier, batch=batch, loss=loss, layout="1x2")
