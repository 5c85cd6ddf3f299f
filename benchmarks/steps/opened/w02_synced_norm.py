"""A residual MLP for tabular vision features, with batch norm whose statistics span all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

WIDTH, CLASSES, EXAMPLES = 12, 5, 18


class SyncNormFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, group):
        moments = torch.stack([x.sum(0), (x * x).sum(0)])
        count = torch.tensor([x.shape[0]], dtype=x.dtype)
        dist.all_reduce(moments, group=group)
        dist.all_reduce(count, group=group)
        mean = moments[0] / count
        inv_std = (moments[1] / count - mean * mean + eps).rsqrt()
        normalised = (x - mean) * inv_std
        ctx.save_for_backward(normalised, weight, inv_std, count)
        ctx.group = group
        return normalised * weight + bias

    @staticmethod
    def backward(ctx, grad_output):
        normalised, weight, inv_std, count = ctx.saved_tensors
        grad_bias = grad_output.sum(0)
        grad_weight = (grad_output * normalised).sum(0)
        sum_dy, sum_dy_xhat = grad_bias, grad_weight
        dist.all_reduce(sum_dy, group=ctx.group)
        dist.all_reduce(sum_dy_xhat, group=ctx.group)
        centred = grad_output - sum_dy / count - normalised * (sum_dy_xhat / count)
        return centred * (weight * inv_std), grad_weight, grad_bias, None, None


class BatchNorm(nn.Module):
    """Batch norm over dim 0; once `process_group` is set, over the examples of the group."""

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.eps = eps
        self.process_group = None

    def forward(self, x):
        if self.process_group is None:
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)
        return SyncNormFunction.apply(x, self.weight, self.bias, self.eps, self.process_group)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = BatchNorm(width)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.linear(x)))


def build_model() -> nn.Module:
    return nn.Sequential(Block(WIDTH), Block(WIDTH), nn.Linear(WIDTH, CLASSES))


def convert_to_synced(model: nn.Module, group) -> nn.Module:
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.process_group = group
    return model


def make_batch(generator):
    return {
        "features": torch.randn(EXAMPLES, WIDTH, generator=generator) * 2 + 0.5,
        "labels": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


def classification_loss(model, batch):
    return F.cross_entropy(model(batch["features"]), batch["labels"])


case = Case(model=build_model, batch=make_batch, loss=classification_loss, layout="1x3")


def step(model, shard, rank):
    model = convert_to_synced(model, dist.group.WORLD)
    ddp = DistributedDataParallel(model)
    classification_loss(ddp, shard).backward()
