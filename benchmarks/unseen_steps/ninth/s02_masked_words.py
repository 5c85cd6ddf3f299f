"""Masked-word pretraining. A window is several micro-batches, and DDP only talks in the last."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

VOCAB, MASK = 31, 0
MICRO = 2


class Bidirectional(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 10)
        self.rnn = nn.GRU(10, 8, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, VOCAB))

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def collate(generator):
    words = torch.randint(1, VOCAB, (12, 9), generator=generator)
    rate = torch.tensor([0.15, 0.2, 0.75, 0.6, 0.3, 0.9] * 2)[:, None]
    hidden = torch.rand(words.shape, generator=generator) < rate
    hidden[:, 0] = True
    return {
        "ids": words.masked_fill(hidden, MASK),
        "labels": words.masked_fill(~hidden, -1),
    }


def summed(model, rows):
    logits = model(rows["ids"])
    return F.cross_entropy(logits.transpose(1, 2), rows["labels"], ignore_index=-1, reduction="sum")


def loss(model, batch):
    return summed(model, batch) / (batch["labels"] >= 0).sum()


class Window:
    """Iterates over micro-batches; `counts` holds the masked words of each, over all ranks."""

    def __init__(self, shard, size):
        rows = len(shard["ids"])
        self.micro = [
            {name: tensor[start : start + size] for name, tensor in shard.items()}
            for start in range(0, rows, size)
        ]
        self.counts = torch.stack([(rows["labels"] >= 0).sum() for rows in self.micro])
        dist.all_reduce(self.counts)

    def __len__(self):
        return len(self.micro)

    def __iter__(self):
        for number, rows in enumerate(self.micro):
            last = number == len(self) - 1
            yield rows, self.counts[number] * len(self), last


def step(model, shard, rank):
    ddp = DDP(model)
    for rows, words, last in Window(shard, MICRO):
        quiet = contextlib.nullcontext() if last else ddp.no_sync()
        with quiet:
            (summed(ddp, rows) * rank.world_size / words).backward()


case = Case(model=Bidirectional, batch=collate, loss=loss)
