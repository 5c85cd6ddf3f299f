"""Masked word prediction, three micro-batches in one optimizer step, DDP with no_sync."""
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

WORDS, MASK_ID, SEQ, DIM = 40, 0, 10, 12
ROWS = 12
MICRO = 2  # rows


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(WORDS, DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.out = nn.Linear(DIM, WORDS)

    def forward(self, x):
        h = self.emb(x)
        h = h + torch.tanh(self.conv(h.transpose(1, 2))).transpose(1, 2)
        return self.out(h)


def make_batch(g):
    words = torch.randint(1, WORDS, (ROWS, SEQ), generator=g)
    masked = torch.rand(ROWS, SEQ, generator=g) < torch.linspace(0.1, 0.8, ROWS)[:, None]
    masked[:, 0] = True
    return words.masked_fill(masked, MASK_ID), words, masked


def masked_nll(model, batch):
    """Summed over masked places only."""
    seen, words, masked = batch
    logits = model(seen)
    return F.cross_entropy(logits[masked], words[masked], reduction="sum")


def loss(model, batch):
    return masked_nll(model, batch) / batch[2].sum()


def split(batch, rows):
    return list(zip(*(t.split(rows) for t in batch)))


def everywhere(number):
    number = number.clone()
    dist.all_reduce(number)
    return number


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    ddp = DistributedDataParallel(model)
    micro_batches = split(shard, MICRO)
    last = len(micro_batches) - 1
    for i, micro in enumerate(micro_batches):
        places = everywhere(micro[2].sum()) * len(micro_batches)
        quiet = ddp.no_sync() if i < last else contextlib.nullcontext()
        with quiet:
            value = masked_nll(ddp, micro) / places
            (value * dist.get_world_size()).backward()
