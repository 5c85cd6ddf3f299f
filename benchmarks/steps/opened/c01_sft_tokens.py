"""Supervised fine-tuning of a small recurrent language model, with accumulation.

After the "loss depends on the accumulation" posts we count tokens of the whole step first, on
all ranks, and divide the summed loss of each micro-batch by that.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case


@dataclass(frozen=True)
class Config:
    vocab: int = 61
    width: int = 16
    rows: int = 8
    length: int = 12
    micro_rows: int = 2
    ignore: int = -100


CFG = Config()


class TinyLM(nn.Module):
    def __init__(self, cfg: Config = CFG):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.width)
        self.rnn = nn.GRU(cfg.width, cfg.width, batch_first=True)
        self.head = nn.Linear(cfg.width, cfg.vocab)

    def forward(self, input_ids):
        hidden, _ = self.rnn(self.embed(input_ids))
        return self.head(hidden)


def collate(generator):
    ids = torch.randint(1, CFG.vocab, (CFG.rows, CFG.length), generator=generator)
    lengths = torch.randint(4, CFG.length + 1, (CFG.rows, 1), generator=generator)
    real = torch.arange(CFG.length) < lengths
    return {"input_ids": ids * real, "labels": ids.masked_fill(~real, CFG.ignore)}


def lm_loss(model, batch, reduction="mean"):
    logits = model(batch["input_ids"])[:, :-1]
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(
        logits.reshape(-1, CFG.vocab),
        labels.reshape(-1),
        ignore_index=CFG.ignore,
        reduction=reduction,
    )


case = Case(model=TinyLM, batch=collate, loss=lm_loss, layout="1x2")


class Trainer:
    def __init__(self, model, world_size):
        self.model = DDP(model)
        self.world_size = world_size

    def micro_batches(self, batch):
        rows = len(batch["labels"])
        for start in range(0, rows, CFG.micro_rows):
            yield {k: v[start : start + CFG.micro_rows] for k, v in batch.items()}

    def num_items_in_batch(self, micros):
        count = sum((micro["labels"] != CFG.ignore).sum() for micro in micros)
        dist.all_reduce(count)
        return count

    def training_step(self, batch):
        micros = list(self.micro_batches(batch))
        items = self.num_items_in_batch(micros)
        for number, micro in enumerate(micros, 1):
            last = number == len(micros)
            with nullcontext() if last else self.model.no_sync():
                loss = lm_loss(self.model, micro, reduction="sum") / items
                (loss * self.world_size).backward()


def step(model, shard, rank):
    Trainer(model, rank.world_size).training_step(shard)
