"""Weibull time-to-failure of machines, trained by a loop whose communication is a callback."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

MACHINES, SENSORS, STEPS, RATE = 32, 5, 2, 0.02


class Weibull(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(SENSORS, 9), nn.SiLU())
        self.scale = nn.Linear(9, 1)
        self.log_shape = nn.Parameter(torch.zeros(()))

    def forward(self, sensors):
        return self.scale(self.trunk(sensors)).squeeze(-1), self.log_shape.exp()


def fleet(generator):
    return {
        "sensors": torch.randn(MACHINES, SENSORS, generator=generator),
        "hours": 0.2 + 2 * torch.rand(MACHINES, generator=generator),
        "failed": torch.randint(0, 2, (MACHINES,), generator=generator).double(),
    }


def loss(model, batch):
    log_scale, shape = model(batch["sensors"])
    z = batch["hours"].log() - log_scale
    log_hazard = shape.log() + (shape - 1) * z - log_scale
    survived = (shape * z).exp()
    return (survived - batch["failed"] * log_hazard).mean()


def make_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=RATE)


class Loop:
    def __init__(self, model, steps):
        self.model, self.steps = model, steps
        self.optimizer = make_optimizer(model.parameters())
        self.callbacks = defaultdict(list)

    def on(self, event, callback):
        self.callbacks[event].append(callback)
        return self

    def fire(self, event):
        for callback in self.callbacks[event]:
            callback(self.model)

    def fit(self, data):
        pieces = zip(*(values.chunk(self.steps) for values in data.values()))
        for values in pieces:
            self.optimizer.zero_grad()
            loss(self.model, dict(zip(data, values))).backward()
            self.fire("before_update")
            self.optimizer.step()
            self.fire("after_update")


class Average:
    """Makes ``of(parameter)`` the mean over the ranks."""

    def __init__(self, of):
        self.of = of

    @torch.no_grad()
    def __call__(self, model):
        for p in model.parameters():
            tensor = self.of(p)
            dist.all_reduce(tensor)
            tensor.div_(dist.get_world_size())


def step(model, shard, rank):
    loop = Loop(model, STEPS)
    loop.on("after_update", Average(of=lambda p: p.data))
    loop.fit(shard)


case = Case(model=Weibull, batch=fleet, loss=loss, layout="1x2")
options = {"compare": "update", "steps": STEPS, "optimizer": make_optimizer}
