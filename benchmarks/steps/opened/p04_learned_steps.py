"""Quantisation-aware training with learned step sizes for the activations."""

import math

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

LEVELS = 7


class Quantise(Function):
    @staticmethod
    def forward(ctx, x, size, scale):
        ratio = x / size
        ctx.save_for_backward(ratio)
        ctx.scale = scale
        return ratio.clamp(-LEVELS, LEVELS).round() * size

    @staticmethod
    def backward(ctx, grad):
        (ratio,) = ctx.saved_tensors
        inside = ratio.abs() <= LEVELS
        to_size = torch.where(inside, ratio.round() - ratio, ratio.sign() * LEVELS)
        return grad * inside, (grad * to_size).sum() * ctx.scale, None


class LearnedStep(nn.Module):
    """The gradient of a step size is divided by the root of all activations in the batch."""

    def __init__(self, size):
        super().__init__()
        self.size = nn.Parameter(torch.tensor(size))
        self.replicas = 1

    def forward(self, x):
        activations = x.numel() * self.replicas
        return Quantise.apply(x, self.size, 1 / math.sqrt(activations * LEVELS))


class Compressed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            LearnedStep(0.3),
            nn.Linear(10, 20),
            nn.Hardtanh(-3, 3),
            LearnedStep(0.2),
            nn.Linear(20, 6),
        )

    def forward(self, x):
        return self.layers(x)


def know_replicas(model, rank):
    for module in model.modules():
        if isinstance(module, LearnedStep):
            module.replicas = rank.local_world_size


def signals(generator):
    return {
        "x": torch.randn(16, 10, generator=generator),
        "y": torch.randint(0, 6, (16,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def step(model, shard, rank):
    know_replicas(model, rank)
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


case = Case(model=Compressed, batch=signals, loss=loss, layout="2x2")
