"""Road segmentation. Parameters reduce themselves, by hooks, while backward still runs."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_equivalence import Case

CLASSES, ACCUMULATE = 3, 3


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(2, cout), nn.SiLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.deep = block(3, 8), block(8, 12)
        self.leave = block(20, 8)
        self.classify = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x):
        fine = self.enter(x)
        coarse = self.deep(nn.functional.max_pool2d(fine, 2))
        coarse = nn.functional.interpolate(coarse, scale_factor=2.0, mode="bilinear")
        return self.classify(self.leave(torch.cat([fine, coarse], 1)))


def roads(generator):
    images = torch.randn(12, 3, 8, 8, generator=generator)
    return images, torch.randint(CLASSES, (12, 8, 8), generator=generator)


def loss(model, batch):
    images, classes = batch
    return cross_entropy(model(images), classes)


case = Case(model=UNet, batch=roads, loss=loss, layout="1x2")


class OverlappedReducer:
    def __init__(self, module, accumulate):
        self.accumulate = accumulate
        self.backwards = 0
        self.world_size = dist.get_world_size()
        self.handles = [
            p.register_post_accumulate_grad_hook(self.on_gradient)
            for p in module.parameters()
            if p.requires_grad
        ]

    @property
    def is_boundary(self):
        return self.backwards % self.accumulate == 0

    def on_gradient(self, p):
        if self.is_boundary:
            p.grad.div_(self.world_size)
            dist.all_reduce(p.grad)

    def backward(self, value):
        (value / self.accumulate).backward()
        self.backwards += 1

    def close(self):
        for handle in self.handles:
            handle.remove()


@contextlib.contextmanager
def reducing(module, accumulate):
    reducer = OverlappedReducer(module, accumulate)
    try:
        yield reducer
    finally:
        reducer.close()


def step(model, shard, rank):
    with reducing(model, ACCUMULATE) as reducer:
        for micro in zip(*(tensor.chunk(ACCUMULATE) for tensor in shard)):
            reducer.backward(loss(model, micro))
