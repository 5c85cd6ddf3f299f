"""Sharpness-aware minimization: climb along the gradient of the big batch, and take the gradient there."""

from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

RHO, LR = 0.5, 0.1


class Sharpness:
    def __init__(self, parameters, rho=RHO):
        self.parameters, self.rho = list(parameters), rho

    @contextmanager
    def climbed(self):
        """The weights are higher up inside, and back where they were after it."""
        gradients = [p.grad.clone() for p in self.parameters]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        with torch.no_grad():
            before = [p.clone() for p in self.parameters]
            for parameter, gradient in zip(self.parameters, gradients):
                parameter += self.rho * gradient / norm
                parameter.grad = None
        yield
        with torch.no_grad():
            for parameter, old in zip(self.parameters, before):
                parameter.copy_(old)


class Loop:
    def __init__(self, model):
        self.model = model
        self.sharpness = Sharpness(model.parameters())
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def closure(self, batch):
        loss(self.model, batch).backward()

    def first(self, batch):
        self.closure(batch)

    def second(self, batch):
        self.closure(batch)

    def __call__(self, batch):
        self.optimizer.zero_grad()
        self.first(batch)
        with self.sharpness.climbed():
            self.second(batch)
        self.optimizer.step()


class ParallelLoop(Loop):
    def __init__(self, model, rank):
        super().__init__(DistributedDataParallel(model))

    def first(self, batch):
        """Nothing is stepped with these gradients, so they stay where they are."""
        with self.model.no_sync():
            self.closure(batch)


class Stereo(nn.Module):
    def __init__(self):
        super().__init__()
        self.eye = nn.Linear(8, 8)
        self.match = nn.Bilinear(8, 8, 3)

    def forward(self, left, right):
        return self.match(torch.tanh(self.eye(left)), torch.tanh(self.eye(right)))


def stereo_pairs(generator):
    left = torch.randn(8, 8, generator=generator)
    return left, left.roll(1, -1), torch.randint(0, 3, (8,), generator=generator)


def loss(model, batch):
    left, right, disparity = batch
    return nn.functional.cross_entropy(model(left, right), disparity)


def on_one_device(model):
    return Loop(model)


case = Case(model=Stereo, batch=stereo_pairs, loss=loss, layout="1x2")
step = ParallelLoop
options = {"compare": "update", "reference": on_one_device}
