"""Two stages on two ranks, all forwards and then all backwards (GPipe)."""

from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

ROWS, FEATURES, HIDDEN, CLASSES, MICRO = 12, 9, 7, 4, 3


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        self.back = nn.Sequential(nn.Tanh(), nn.Linear(HIDDEN, CLASSES))

    def forward(self, x):
        return self.back(self.front(x))


class Front:
    """First stage: sends activations, and waits for their gradients."""

    def __init__(self, module, peer):
        self.module, self.peer = module, peer
        self.in_flight = deque()

    def forward(self, x):
        out = self.module(x)
        dist.send(out.detach(), self.peer)
        self.in_flight.append(out)

    def backward(self):
        out = self.in_flight.pop()
        gradient = torch.empty_like(out)
        dist.recv(gradient, self.peer)
        out.backward(gradient)


class Back:
    """Last stage: receives activations, and has the labels."""

    def __init__(self, module, peer, scale):
        self.module, self.peer, self.scale = module, peer, scale
        self.in_flight = deque()

    def forward(self, x, labels):
        hidden = torch.empty(len(x), HIDDEN, dtype=x.dtype)
        dist.recv(hidden, self.peer)
        hidden.requires_grad_()
        value = F.cross_entropy(self.module(hidden), labels, reduction="sum") * self.scale
        self.in_flight.append((hidden, value))

    def backward(self):
        hidden, value = self.in_flight.popleft()
        value.backward()
        dist.send(hidden.grad, self.peer)


def share(module, source):
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.broadcast(parameter.grad, src=source)


def rows(generator):
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (ROWS,), generator=generator)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


case = Case(model=Classifier, batch=rows, loss=loss, layout="1x2", shards="own")


def step(model, batch, rank):
    parts = list(zip(*(each.split(MICRO) for each in batch)))
    if rank.rank == 0:
        stage = Front(model.front, peer=1)
        for x, _ in parts:
            stage.forward(x)
    else:
        stage = Back(model.back, peer=0, scale=1 / ROWS)
        for x, labels in parts:
            stage.forward(x, labels)
    for _ in parts:
        stage.backward()
    share(model.front, source=0)
    share(model.back, source=1)
