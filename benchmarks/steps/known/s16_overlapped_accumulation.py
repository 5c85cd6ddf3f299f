"""Gradient accumulation with an all-reduce that starts as soon as a gradient is there."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

ACCUMULATION = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = x + torch.tanh(self.second(x))
        return self.last(x).squeeze(1)


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def make_batch(generator):
    return torch.randn(16, 6, generator=generator), torch.randn(16, generator=generator)


case = Case(model=Net, batch=make_batch, loss=loss, layout="1x4")


class OverlappedReducer:
    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.handles = []
        self.hooks = []

    def attach(self):
        self.hooks = [p.register_post_accumulate_grad_hook(self._start) for p in self.params]

    def _start(self, param):
        self.handles.append(dist.all_reduce(param.grad, async_op=True))
        if len(self.handles) == len(self.params):
            self.wait()

    def wait(self):
        for handle in self.handles:
            handle.wait()
        self.handles.clear()

    def detach(self):
        for hook in self.hooks:
            hook.remove()


def train_step(model, batch, world_size):
    examples = len(batch[0]) * world_size
    reducer = OverlappedReducer(model)
    model.zero_grad()
    reducer.attach()
    chunks = list(zip(*(part.chunk(ACCUMULATION) for part in batch), strict=True))
    for x, y in chunks:
        squared = F.mse_loss(model(x), y, reduction="sum")
        (squared / examples).backward()
    reducer.detach()


def step(model, shard, rank):
    train_step(model, shard, rank.world_size)
