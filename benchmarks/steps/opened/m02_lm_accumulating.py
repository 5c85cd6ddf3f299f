"""A small recurrent language model; the trainer accumulates over micro-batches of ragged sentences."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

VOCABULARY, LENGTH, PAD = 23, 10, -100


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 10)
        self.rnn = nn.GRU(10, 14, batch_first=True)
        self.head = nn.Linear(14, VOCABULARY)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def sentences(generator):
    ids = torch.randint(VOCABULARY, (16, LENGTH + 1), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (16, 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.arange(LENGTH) >= lengths] = PAD
    return {"ids": ids[:, :-1], "labels": labels}


def summed(model, batch):
    logits = model(batch["ids"])
    return F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=PAD, reduction="sum"
    )


def loss(model, batch):
    return summed(model, batch) / (batch["labels"] != PAD).sum()


class Accumulating:
    """Mixin that cuts a rank's batch into micro-batches."""

    micro_batches = 4

    def micro(self, batch):
        pieces = {name: value.chunk(self.micro_batches) for name, value in batch.items()}
        for index in range(self.micro_batches):
            yield {name: chunks[index] for name, chunks in pieces.items()}


class Trainer(Accumulating):
    def __init__(self, model, rank):
        self.model = model
        self.world_size = rank.world_size

    def count_tokens(self, batch):
        count = (batch["labels"] != PAD).sum()
        dist.all_reduce(count)
        return count

    def compute_loss(self, batch):
        return summed(self.model, batch) / self.count_tokens(batch)

    def synchronize(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)

    def optimize(self, batch):
        self.model.zero_grad()
        for micro in self.micro(batch):
            (self.compute_loss(micro) / self.micro_batches).backward()
        self.synchronize()


def step(model, shard, rank):
    Trainer(model, rank).optimize(shard)


case = Case(model=LanguageModel, batch=sentences, loss=loss)
