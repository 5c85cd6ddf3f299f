"""A character model whose gradients travel in buckets of a fixed size."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

LINES, LENGTH, VOCABULARY = 8, 13, 20
BUCKET_BYTES = 8 * 1024


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.rnn = nn.GRU(12, 16, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, characters):
        hidden, _ = self.rnn(self.embed(characters))
        return self.out(self.norm(hidden))


def make_batch(generator):
    return {"text": torch.randint(VOCABULARY, (LINES, LENGTH), generator=generator)}


def loss(model, batch):
    text = batch["text"]
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), text[:, 1:])


class Bucket:
    def __init__(self):
        self.grads = []
        self.bytes = 0

    def add(self, grad):
        self.grads.append(grad)
        self.bytes += grad.numel() * grad.element_size()

    def reduce(self, world_size):
        flat = torch.cat([grad.reshape(-1) for grad in self.grads])
        dist.all_reduce(flat)
        flat /= world_size
        offset = 0
        for grad in self.grads:
            grad.copy_(flat[offset : offset + grad.numel()].view_as(grad))
            offset += grad.numel()


def buckets_of(parameters, limit):
    """Last layers first, since their gradients are ready first."""
    bucket = Bucket()
    for parameter in reversed(list(parameters)):
        if parameter.grad is None:
            continue
        bucket.add(parameter.grad)
        if bucket.bytes >= limit:
            yield bucket
            bucket = Bucket()


def step(model, shard, rank):
    loss(model, shard).backward()
    for bucket in buckets_of(model.parameters(), BUCKET_BYTES):
        bucket.reduce(rank.world_size)


case = Case(model=CharModel, batch=make_batch, loss=loss, layout="1x2")
