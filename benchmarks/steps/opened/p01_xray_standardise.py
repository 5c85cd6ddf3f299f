"""X-ray findings, with batch statistics over all ranks (the built-in layer wants GPUs)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

EPS = 1e-5


class Standardise(Function):
    """(x - mean) / std, with mean and variance of the rows on all ranks."""

    @staticmethod
    def forward(ctx, x, across):
        count = torch.full((1,), float(len(x)), dtype=x.dtype)
        sums = torch.cat([x.sum(0), x.pow(2).sum(0), count])
        if across:
            dist.all_reduce(sums)
        first, second, count = sums.split([x.shape[1], x.shape[1], 1])
        mean = first / count
        inverse = (second / count - mean.pow(2) + EPS).rsqrt()
        normal = (x - mean) * inverse
        ctx.save_for_backward(normal, inverse, count)
        ctx.across = across
        return normal

    @staticmethod
    def backward(ctx, grad):
        normal, inverse, count = ctx.saved_tensors
        sums = torch.stack([grad.sum(0), (grad * normal).sum(0)])
        mean, slope = sums / count
        return inverse * (grad - mean - normal * slope), None


class BatchStatistics(nn.Module):
    across = False

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size))
        self.bias = nn.Parameter(0.1 * torch.randn(size))

    def forward(self, x):
        return self.weight * Standardise.apply(x, self.across) + self.bias


def convert(module):
    for child in module.modules():
        if isinstance(child, BatchStatistics):
            child.across = True
    return module


def build():
    return nn.Sequential(
        nn.Linear(18, 10), BatchStatistics(10), nn.ReLU(), nn.Linear(10, 5), BatchStatistics(5)
    )


def pictures(generator):
    return {
        "pixels": torch.randn(12, 18, generator=generator),
        "findings": (torch.rand(12, 5, generator=generator) < 0.4).double(),
    }


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch["pixels"]), batch["findings"])


def step(model, shard, rank):
    ddp = DistributedDataParallel(convert(model))
    loss(ddp, shard).backward()


case = Case(model=build, batch=pictures, loss=loss, layout="1x2")
