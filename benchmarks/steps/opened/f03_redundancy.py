"""Redundancy-reduction pretraining (two views, cross-correlation close to the identity)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


class GlobalBatchNorm(nn.Module):
    """Batch statistics over the rows of all ranks, for inputs (N, C) and (N, C, L)."""

    def __init__(self, features, eps=1e-5, affine=True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(features)) if affine else None

    @classmethod
    def like(cls, norm):
        made = cls(norm.num_features, eps=norm.eps, affine=norm.affine)
        if norm.affine:
            made.weight, made.bias = norm.weight, norm.bias
        return made

    def forward(self, x):
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        moments = torch.stack([x.mean(dims), x.square().mean(dims)])
        mean, square = all_reduce(moments) / dist.get_world_size()
        std = (square - mean.square() + self.eps).sqrt()
        out = (x - mean.view(shape)) / std.view(shape)
        if self.weight is None:
            return out
        return out * self.weight.view(shape) + self.bias.view(shape)


def convert_norms(module):
    """Replaces the batch normalizations below `module`, keeping their parameters."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm1d) and child.affine:
            setattr(module, name, GlobalBatchNorm.like(child))
        else:
            convert_norms(child)
    return module


class TwinEncoder(nn.Module):
    def __init__(self, width=8, dim=5):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv1d(2, width, 3, padding=1),
            nn.BatchNorm1d(width),
            nn.SiLU(),
            nn.AdaptiveAvgPool1d(2),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(
            nn.Linear(2 * width, 12),
            nn.BatchNorm1d(12),
            nn.SiLU(),
            nn.Linear(12, dim, bias=False),
            nn.BatchNorm1d(dim, affine=False),
        )

    def forward(self, first, second):
        return (self.projector(self.backbone(view)) for view in (first, second))


def correlation_penalty(correlation, off_diagonal=0.02):
    eye = torch.eye(len(correlation), dtype=correlation.dtype)
    weight = eye + off_diagonal * (1 - eye)
    return (weight * (correlation - eye).square()).sum()


def pretraining_loss(model, batch):
    first, second = model(batch["first"], batch["second"])
    return correlation_penalty(first.T @ second / len(first))


def make_batch(generator):
    signal = torch.randn(16, 2, 9, generator=generator)
    jitter = torch.randn(2, 16, 2, 9, generator=generator)
    return {"first": signal + 0.3 * jitter[0], "second": signal + 0.3 * jitter[1]}


class PretrainingRun:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(convert_norms(model))

    def train_step(self, batch):
        first, second = self.ddp(batch["first"], batch["second"])
        total = len(first) * dist.get_world_size()
        correlation = all_reduce(first.T @ second) / total
        correlation_penalty(correlation).backward()


case = Case(model=TwinEncoder, batch=make_batch, loss=pretraining_loss, layout="1x2")


def step(model, shard, rank):
    PretrainingRun(model).train_step(shard)
