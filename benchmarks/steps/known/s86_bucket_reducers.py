"""Gradients travel in buckets during the backward pass; trunk and head have a reducer each."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_equivalence import Case


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.trunk(x))


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["label"])


def make_batch(generator):
    return {
        "x": torch.randn(16, 6, generator=generator),
        "label": torch.randint(0, 3, (16,), generator=generator),
    }


case = Case(model=Net, batch=make_batch, loss=loss, layout="2x2")


class BucketReducer:
    def __init__(self, module, capacity):
        self.capacity = capacity  # numbers in a bucket
        self.pending = []
        self.inflight = []
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        self.pending.append(p)
        if sum(q.numel() for q in self.pending) >= self.capacity:
            self.launch()

    def launch(self):
        params, self.pending = self.pending, []
        flat = torch.cat([p.grad.flatten() for p in params])
        work = dist.all_reduce(flat, async_op=True)
        self.inflight.append((work, flat, params))

    def finish(self):
        """After the backward pass: the bucket that is not full, then wait for everything."""
        if not self.inflight:
            return
        if self.pending:
            self.launch()
        for work, flat, params in self.inflight:
            work.wait()
            flat /= dist.get_world_size()
            pieces = flat.split([p.numel() for p in params])
            for p, piece in zip(params, pieces, strict=True):
                p.grad.copy_(piece.view_as(p))
        self.inflight.clear()


def step(model, shard, rank):
    model.zero_grad()
    reducers = [BucketReducer(model.trunk, capacity=128), BucketReducer(model.head, capacity=128)]
    loss(model, shard).backward()
    for reducer in reducers:
        reducer.finish()
