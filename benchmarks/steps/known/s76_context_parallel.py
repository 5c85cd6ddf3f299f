"""Context parallelism: all ranks have the same sequences, and each one a stretch of columns."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

VOCAB, LENGTH = 12, 16
IGNORE = -1


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 8)
        self.positions = nn.Embedding(LENGTH, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.positions(positions)
        return self.head(x + torch.tanh(self.hidden(x)))


def summed_loss(model, tokens, labels, positions):
    logits = model(tokens, positions)
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def loss(model, batch):
    labels = F.pad(batch["tokens"][:, 1:], (0, 1), value=IGNORE)
    total = summed_loss(model, batch["tokens"], labels, torch.arange(LENGTH, device=labels.device))
    return total / (labels != IGNORE).sum()


def make_batch(generator):
    return {"tokens": torch.randint(0, VOCAB, (3, LENGTH), generator=generator)}


case = Case(model=Decoder, batch=make_batch, loss=loss, layout="1x4", shards="own")


class ContextParallelPlan:
    def __init__(self, rank, degree):
        self.rank = rank
        self.degree = degree

    def columns(self, length):
        assert length % self.degree == 0
        return torch.arange(length).chunk(self.degree)[self.rank]

    def split(self, tokens):
        """This rank's inputs, the labels they have to predict, and their positions."""
        columns = self.columns(tokens.shape[1]).to(tokens.device)
        inputs = tokens[:, columns]
        labels = F.pad(inputs[:, 1:], (0, 1), value=IGNORE)
        return inputs, labels, columns


def step(model, shard, rank):
    model.zero_grad()
    plan = ContextParallelPlan(rank.rank, rank.world_size)
    inputs, labels, positions = plan.split(shard["tokens"])
    count = (labels != IGNORE).sum()
    dist.all_reduce(count)
    (summed_loss(model, inputs, labels, positions) / count).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
