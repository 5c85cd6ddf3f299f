"""Behaviour cloning of a controller, with clipped gradients and momentum."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

LARGEST = 0.3


class Controller(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.mean = nn.Linear(16, 2)
        self.log_std = nn.Parameter(torch.zeros(2))

    def forward(self, state):
        return self.mean(self.body(state)), self.log_std


def demonstrations(generator):
    state = torch.randn(24, 7, generator=generator)
    force = state[:, :2] - 0.5 * state[:, 2:4] + 0.2 * torch.randn(24, 2, generator=generator)
    # the second operator pushes much harder
    return {"state": state, "force": force * torch.linspace(0.2, 4, 24).unsqueeze(1)}


def loss(model, batch):
    mean, log_std = model(batch["state"])
    error = (batch["force"] - mean) / log_std.exp()
    return (0.5 * error.pow(2) + log_std).sum(dim=1).mean()


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Callbacks:
    """What happens between backward and the step of the optimizer, in this order."""

    def __init__(self):
        self.calls = []

    def __call__(self, function):
        self.calls.append(function)
        return function

    def run(self, model, rank):
        for call in self.calls:
            call(model, rank)


after_backward = Callbacks()


@after_backward
def clip(model, rank):
    nn.utils.clip_grad_norm_(model.parameters(), LARGEST)


@after_backward
def average(model, rank):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


def step(model, shard, rank):
    optimizer = make_optimizer(model.parameters())
    optimizer.zero_grad()
    loss(model, shard).backward()
    after_backward.run(model, rank)
    optimizer.step()


case = Case(model=Controller, batch=demonstrations, loss=loss, layout="1x2")
options = {"compare": "update", "optimizer": make_optimizer, "clip": LARGEST}
