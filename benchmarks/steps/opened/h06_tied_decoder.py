"""An autoencoder for ratings whose decoder is the encoder's table. Gradients are summed by hand."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

ITEMS, WIDTH, PEOPLE = 20, 7, 12


class Encoder(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, ratings):
        taste = ratings @ self.table.weight / ITEMS**0.5
        return taste * torch.sigmoid(self.gate(taste))


class Decoder(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table
        self.bias = nn.Parameter(torch.zeros(ITEMS))

    def forward(self, taste):
        return taste @ self.table.weight.T + self.bias


class AutoRec(nn.Module):
    def __init__(self):
        super().__init__()
        table = nn.Embedding(ITEMS, WIDTH)
        self.encoder, self.decoder = Encoder(table), Decoder(table)

    def forward(self, ratings):
        return self.decoder(self.encoder(ratings))


def squared_errors(model, ratings, known):
    return ((model(ratings * known) - ratings).square() * known).sum()


class Reducer:
    """Sums the gradients of some modules. Losses are divided by the global count before."""

    def __init__(self, *modules):
        self.modules = modules

    def parameters(self):
        for module in self.modules:
            yield from module.parameters()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            for parameter in self.parameters():
                dist.all_reduce(parameter.grad)


def people(generator):
    return {
        "ratings": torch.randint(1, 6, (PEOPLE, ITEMS), generator=generator).double(),
        "known": (torch.rand(PEOPLE, ITEMS, generator=generator) < 0.4).double(),
    }


def loss(model, batch):
    return squared_errors(model, **batch) / batch["known"].sum()


case = Case(model=AutoRec, batch=people, loss=loss, layout="1x2")


def step(model, shard, rank):
    count = shard["known"].sum()
    dist.all_reduce(count)
    with Reducer(model.encoder, model.decoder):
        (squared_errors(model, **shard) / count).backward()
