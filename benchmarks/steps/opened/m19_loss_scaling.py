"""Ultrasound regression with automatic loss scaling, written for half precision."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 4, 5, stride=2), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.ReLU(), nn.Flatten()
        )
        self.depth = nn.Linear(20, 1)

    def forward(self, echoes):
        return self.depth(self.layers(echoes)).squeeze(-1)


def echoes(generator):
    # the far echoes come last
    distance = torch.linspace(0.1, 9, 12)
    return {
        "echo": torch.randn(12, 1, 17, generator=generator),
        "depth": distance + 0.1 * torch.randn(12, generator=generator),
    }


def loss(model, batch):
    return F.mse_loss(model(batch["echo"]), batch["depth"])


class AutoScaler:
    """The power of two that brings the loss close to `target`."""

    def __init__(self, target=1024.0):
        self.target = target
        self.factor = 1.0

    def update(self, objective):
        magnitude = max(objective.detach().item(), 1e-8)
        self.factor = 2.0 ** math.floor(math.log2(self.target / magnitude))

    def scale(self, objective):
        self.update(objective)
        return objective * self.factor

    @torch.no_grad()
    def unscale_(self, parameters):
        for parameter in parameters:
            parameter.grad /= self.factor


class MixedPrecisionTrainer:
    def __init__(self, model, rank):
        self.model, self.world_size = model, rank.world_size
        self.scaler = AutoScaler()

    def allreduce_gradients(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size

    def __call__(self, batch):
        parameters = list(self.model.parameters())
        self.scaler.scale(loss(self.model, batch)).backward()
        self.allreduce_gradients()
        self.scaler.unscale_(parameters)


def step(model, shard, rank):
    MixedPrecisionTrainer(model, rank)(shard)


case = Case(model=Net, batch=echoes, loss=loss)
