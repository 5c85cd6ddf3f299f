"""A small reducer with buckets that overlaps communication with the backward pass."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

BUCKET_ELEMENTS = 60


def build_model():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 4))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def make_batch(generator):
    return {
        "x": torch.randn(12, 5, generator=generator),
        "y": torch.randint(0, 4, (12,), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


class BucketedReducer:
    def __init__(self, model, limit=BUCKET_ELEMENTS):
        self.limit = limit
        self.bucket = []
        self.size = 0
        self.in_flight = []
        self.hooks = [
            p.register_post_accumulate_grad_hook(self._on_grad)
            for p in model.parameters()
            if p.requires_grad
        ]

    def _on_grad(self, param):
        self.bucket.append(param)
        self.size += param.numel()
        if self.size >= self.limit:
            self._launch()

    def _launch(self):
        flat = torch.cat([p.grad.reshape(-1) for p in self.bucket])
        flat.div_(dist.get_world_size())
        handle = dist.all_reduce(flat, async_op=True)
        self.in_flight.append((handle, flat, self.bucket))
        self.bucket, self.size = [], 0

    def finish(self):
        for handle, flat, params in self.in_flight:
            handle.wait()
            pieces = flat.split([p.numel() for p in params])
            for p, piece in zip(params, pieces, strict=True):
                p.grad.copy_(piece.view_as(p))
        self.in_flight.clear()

    def remove(self):
        for hook in self.hooks:
            hook.remove()


def step(model, shard, rank):
    reducer = BucketedReducer(model)
    loss(model, shard).backward()
    reducer.finish()
    reducer.remove()
