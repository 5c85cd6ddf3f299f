"""Overlapped averaging: hooks fill buckets, a full bucket is sent while the backward goes on."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


class Codec(nn.Module):
    """Learned compression: reconstruction error plus a rate that is a soft L1 of the code."""

    def __init__(self):
        super().__init__()
        self.analysis = nn.Sequential(nn.Linear(14, 10), nn.GELU(), nn.Linear(10, 4))
        self.synthesis = nn.Sequential(nn.Linear(4, 10), nn.GELU(), nn.Linear(10, 14))

    def forward(self, rows):
        code = self.analysis(rows)
        return self.synthesis(code), code


def make_batch(generator):
    return torch.randn(16, 14, generator=generator)


def loss(model, batch):
    restored, code = model(batch)
    rate = torch.sqrt(code.square() + 0.01).sum(-1).mean()
    return F.mse_loss(restored, batch) + 0.02 * rate


class Buckets:
    def __init__(self, model, capacity):
        self.capacity = capacity
        self.waiting, self.size, self.sent = [], 0, []
        self.handles = [
            p.register_post_accumulate_grad_hook(self.ready) for p in model.parameters()
        ]

    def ready(self, p):
        self.waiting.append(p)
        self.size += p.numel()
        if self.size >= self.capacity:
            self.send()

    def send(self):
        flat = torch.cat([p.grad.flatten() for p in self.waiting])
        flat /= dist.get_world_size()
        work = dist.all_reduce(flat, async_op=True)
        self.sent.append((self.waiting, flat, work))
        self.waiting, self.size = [], 0

    def finish(self):
        for params, flat, work in self.sent:
            work.wait()
            for p, part in zip(params, flat.split([p.numel() for p in params])):
                p.grad.copy_(part.view_as(p))
        self.sent.clear()
        for handle in self.handles:
            handle.remove()


def step(model, shard, rank):
    buckets = Buckets(model, capacity=200)
    loss(model, shard).backward()
    buckets.finish()


case = Case(model=Codec, batch=make_batch, loss=loss, layout="1x2")
