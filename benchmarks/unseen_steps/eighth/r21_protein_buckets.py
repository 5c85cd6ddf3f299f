"""Contact maps of proteins, with gradients that travel in buckets of our own, filled from the last layer to the first."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

CHAINS, RESIDUES, AMINO_ACIDS, WIDTH = 8, 9, 20, 6
BUCKET_ELEMENTS = 60


class ContactNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.randn(RESIDUES, WIDTH) / 2)
        self.embed = nn.Embedding(AMINO_ACIDS, WIDTH)
        self.local = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.left = nn.Linear(WIDTH, 5)
        self.right = nn.Linear(WIDTH, 5)

    def forward(self, chains):
        hidden = self.embed(chains) + self.place
        hidden = hidden + F.relu(self.local(hidden.transpose(1, 2))).transpose(1, 2)
        return self.left(hidden) @ self.right(hidden).transpose(1, 2)


def make_batch(generator):
    near = torch.rand(CHAINS, RESIDUES, RESIDUES, generator=generator) < 0.3
    return {
        "chains": torch.randint(AMINO_ACIDS, (CHAINS, RESIDUES), generator=generator),
        "contacts": (near | near.transpose(1, 2)).float(),
    }


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch["chains"]), batch["contacts"])


class Buckets:
    def __init__(self, world_size, capacity=BUCKET_ELEMENTS):
        self.world_size = world_size
        self.capacity = capacity
        self.waiting, self.elements = [], 0
        self.in_flight = []

    def add(self, gradient):
        self.waiting.append(gradient)
        self.elements += gradient.numel()
        if self.elements >= self.capacity:
            self.send()

    def send(self):
        flat = torch.cat([gradient.reshape(-1) for gradient in self.waiting])
        work = dist.all_reduce(flat, async_op=True)
        self.in_flight.append((work, flat, self.waiting))
        self.waiting, self.elements = [], 0

    def finish(self):
        """Wait for everything, and put the means where the gradients were."""
        while self.in_flight:
            work, flat, gradients = self.in_flight.pop()
            work.wait()
            pieces = flat.split([gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces):
                gradient.copy_(piece.view_as(gradient) / self.world_size)


def step(model, shard, rank):
    loss(model, shard).backward()
    buckets = Buckets(rank.world_size)
    for parameter in reversed(list(model.parameters())):
        buckets.add(parameter.grad)
    buckets.finish()


case = Case(model=ContactNet, batch=make_batch, loss=loss, layout="1x2")
