"""Long sequences are split between the ranks: each rank has a slice of every sequence."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

VOCABULARY, LENGTH, WIDTH, TAGS = 9, 8, 6, 4


class Tagger(nn.Module):
    """Every token is tagged on its own, from its value and its place in the sequence."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, TAGS)
        )

    def forward(self, tokens, places=None):
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.mlp(self.tokens(tokens) + self.places(places))


def tagging_loss(logits, tags):
    return F.cross_entropy(logits.flatten(0, 1), tags.flatten())


def loss(model, batch):
    return tagging_loss(model(batch["tokens"]), batch["tags"])


def make_batch(generator):
    return {
        "tokens": torch.randint(0, VOCABULARY, (6, LENGTH), generator=generator),
        "tags": torch.randint(0, TAGS, (6, LENGTH), generator=generator),
    }


case = Case(model=Tagger, batch=make_batch, loss=loss, layout="1x2", shards="own")


class ContextParallel:
    def __init__(self, rank):
        self.rank = rank.rank
        self.world_size = rank.world_size

    def take(self, tensor):
        """This rank's slice of every sequence."""
        return tensor.chunk(self.world_size, dim=1)[self.rank]

    def shard(self, batch):
        return {name: self.take(tensor) for name, tensor in batch.items()}


def train_step(ddp, batch, parallel):
    part = parallel.shard(batch)
    ddp.zero_grad()
    logits = ddp(part["tokens"])
    value = tagging_loss(logits, part["tags"])
    value.backward()
    return value.detach()


def step(model, shard, rank):
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    train_step(ddp, shard, ContextParallel(rank))
