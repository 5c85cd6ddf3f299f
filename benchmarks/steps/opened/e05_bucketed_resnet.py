"""A small residual network with group norm; gradients travel in buckets of a fixed size."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case

BUCKET_ELEMENTS = 1200


def conv(cin, cout, stride=1):
    return nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)


class Residual(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.body = nn.Sequential(
            conv(cin, cout, stride), nn.GroupNorm(2, cout), nn.ReLU(), conv(cout, cout), nn.GroupNorm(2, cout)
        )
        self.skip = nn.Conv2d(cin, cout, 1, stride=stride)

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


class ProductTagger(nn.Module):
    """Which of seven tags does a product photo have? Any number of them."""

    def __init__(self):
        super().__init__()
        self.stem = conv(3, 8)
        self.stages = nn.Sequential(Residual(8, 8, 1), Residual(8, 12, 2))
        self.tags = nn.Linear(12, 7)

    def forward(self, photos):
        return self.tags(self.stages(self.stem(photos)).mean((2, 3)))


def photos_with_tags(generator):
    photos = torch.randn(12, 3, 8, 8, generator=generator)
    tags = (torch.rand(12, 7, generator=generator) < 0.3).float()
    return photos, tags


def loss(model, batch):
    photos, tags = batch
    positive = torch.full((7,), 2.5, dtype=photos.dtype)
    return F.binary_cross_entropy_with_logits(model(photos), tags, pos_weight=positive)


case = Case(model=ProductTagger, batch=photos_with_tags, loss=loss, layout="1x2")


class BucketReducer:
    """Fewer, larger messages. Parameters are visited last to first, as backward makes them."""

    def __init__(self, parameters, capacity=BUCKET_ELEMENTS):
        self.parameters = list(parameters)[::-1]
        self.capacity = capacity
        self.bucket, self.filled = [], 0

    def flush(self):
        flat = torch.cat([p.grad.flatten() for p in self.bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, piece in zip(self.bucket, flat.split([p.numel() for p in self.bucket])):
            p.grad.copy_(piece.view_as(p))
        self.bucket, self.filled = [], 0

    def add(self, p):
        if self.bucket and self.filled + p.numel() > self.capacity:
            self.flush()
        self.bucket.append(p)
        self.filled += p.numel()

    def reduce(self):
        for p in self.parameters:
            self.add(p)


def step(model, shard, rank):
    reducer = BucketReducer(model.parameters())
    loss(model, shard).backward()
    reducer.reduce()
