"""Gradient accumulation over chunks of three rows, as the card holds no more."""

from contextlib import nullcontext
from typing import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class Surrogate(nn.Module):
    """Maps the coefficients of a PDE to its solution on a grid."""

    def __init__(self, grid=12):
        super().__init__()
        self.lift = nn.Linear(3, 16)
        self.spectral = nn.Parameter(torch.randn(16, 16) / 4)
        self.drop = nn.Linear(16, grid)

    def forward(self, coefficients):
        hidden = torch.sin(self.lift(coefficients))
        return self.drop(hidden + torch.sin(hidden @ self.spectral))


def relative_error(prediction, truth):
    """The mean over rows of |error|^2 / |truth|^2."""
    return ((prediction - truth).square().sum(-1) / truth.square().sum(-1)).mean()


class Chunks:
    def __init__(self, inputs, truth, size):
        self.inputs, self.truth, self.size = inputs, truth, size

    def __len__(self):
        return -(-len(self.inputs) // self.size)

    def __iter__(self) -> Iterator[tuple[bool, torch.Tensor, torch.Tensor]]:
        pairs = list(zip(self.inputs.split(self.size), self.truth.split(self.size)))
        for number, (inputs, truth) in enumerate(pairs, 1):
            yield number == len(pairs), inputs, truth


class Accumulator:
    def __init__(self, ddp, size=3):
        self.ddp, self.size = ddp, size

    def backward(self, inputs, truth):
        chunks = Chunks(inputs, truth, self.size)
        for last, some_inputs, some_truth in chunks:
            with nullcontext() if last else self.ddp.no_sync():
                value = relative_error(self.ddp(some_inputs), some_truth)
                (value / len(chunks)).backward()


def solutions(generator):
    coefficients = torch.rand(16, 3, generator=generator)
    x = torch.linspace(0, 1, 12)
    a, b, c = coefficients.unsqueeze(-1).unbind(1)
    return coefficients, a + torch.sin(6 * b * x) * torch.exp(-c * x)


def loss(model, batch):
    inputs, truth = batch
    return relative_error(model(inputs), truth)


case = Case(model=Surrogate, batch=solutions, loss=loss, layout="1x2")


def step(model, shard, rank):
    Accumulator(DistributedDataParallel(model)).backward(*shard)
