"""Image classification with a batch normalisation of our own that spans the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

IMAGES, SIDE, CLASSES = 8, 6, 4


class NormalizeOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps, group):
        dims = (0, 2, 3)
        count = x.new_tensor([x.numel() / x.shape[1]])
        sums = torch.cat([x.sum(dims), x.square().sum(dims), count])
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, squares, count = sums.split([x.shape[1], x.shape[1], 1])
        mean = total / count
        inverse = (squares / count - mean.square() + eps).rsqrt()
        normal = (x - mean[:, None, None]) * inverse[:, None, None]
        ctx.save_for_backward(normal, inverse, count)
        ctx.group = group
        return normal

    @staticmethod
    def backward(ctx, grad):
        normal, inverse, count = ctx.saved_tensors
        dims = (0, 2, 3)
        sums = torch.stack([grad.sum(dims), (grad * normal).sum(dims)])
        count = count if ctx.group is None else count / dist.get_world_size(ctx.group)
        by_mean, by_scale = (sums / count)[..., None, None]
        return (grad - by_mean - normal * by_scale) * inverse[:, None, None], None, None


class RankNorm(nn.Module):
    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels) + 0.5)
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps
        self.group = None

    def forward(self, x):
        normal = NormalizeOverRanks.apply(x, self.eps, self.group)
        return normal * self.weight[:, None, None] + self.bias[:, None, None]


def build():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        RankNorm(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2),
        RankNorm(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 2 * 2, CLASSES),
    )


def make_batch(generator):
    brightness = torch.linspace(0.5, 2.0, IMAGES)[:, None, None, None]
    return {
        "images": torch.rand(IMAGES, 1, SIDE, SIDE, generator=generator) * brightness,
        "labels": torch.randint(CLASSES, (IMAGES,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def join(model, group):
    for module in model.modules():
        if isinstance(module, RankNorm):
            module.group = group
    return model


def step(model, shard, rank):
    ddp = DistributedDataParallel(join(model, dist.group.WORLD))
    loss(ddp, shard).backward()


case = Case(model=build, batch=make_batch, loss=loss)
