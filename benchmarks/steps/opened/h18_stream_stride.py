"""Rows come from a stream that nobody can index, so each rank lets the others' rows pass by."""

from itertools import islice

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from ddp_equivalence import Case


class Stream(IterableDataset):
    def __init__(self, *columns):
        self.columns = columns

    def __iter__(self):
        yield from zip(*self.columns)


class EveryNth(IterableDataset):
    """The rows number first, first + nth, first + 2 nth, ... of a stream."""

    def __init__(self, stream, first, nth=2):
        self.stream, self.first, self.nth = stream, first, nth

    def __iter__(self):
        return islice(iter(self.stream), self.first, None, self.nth)


class Shuffled(IterableDataset):
    """Through a buffer, in an order that only depends on the seed."""

    def __init__(self, stream, seed, size=4):
        self.stream, self.seed, self.size = stream, seed, size

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        buffer = []
        for row in self.stream:
            buffer.append(row)
            if len(buffer) == self.size:
                yield buffer.pop(int(torch.randint(self.size, (), generator=generator)))
        yield from buffer


def loader_of(batch, rank, seed=0):
    rows = EveryNth(Shuffled(Stream(*batch), seed), rank.rank)
    return DataLoader(rows, batch_size=64)


class Ranker(nn.Module):
    """Bayesian personalised ranking."""

    def __init__(self, people=9, films=17, size=5):
        super().__init__()
        self.people, self.films = nn.Embedding(people, size), nn.Embedding(films, size)
        self.popularity = nn.Embedding(films, 1)

    def score(self, person, film):
        return (self.people(person) * self.films(film)).sum(-1) + self.popularity(film).squeeze(-1)

    def forward(self, person, seen, unseen):
        return self.score(person, seen) - self.score(person, unseen)


def triples(generator):
    def draw(limit):
        return torch.randint(0, limit, (24,), generator=generator)

    return draw(9), draw(17), draw(17)


def loss(model, batch):
    return nn.functional.softplus(-model(*batch)).mean()


case = Case(model=Ranker, batch=triples, loss=loss, layout="1x3", shards="own")


def step(model, batch, rank):
    ddp = DistributedDataParallel(model)
    for rows in loader_of(batch, rank):
        loss(ddp, rows).backward()
