"""Imputation of irregular series. Gradients leave as soon as a parameter has one."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

SERIES, TIMES, CHANNELS, MICRO = 16, 9, 3, 2


class Imputer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(2 * CHANNELS, 12)
        self.mix = nn.Conv1d(12, 12, kernel_size=3, padding=1)
        self.outward = nn.Linear(12, CHANNELS)

    def forward(self, values, seen):
        h = torch.tanh(self.inward(torch.cat([values * seen, seen], dim=-1)))
        h = h + torch.tanh(self.mix(h.transpose(1, 2))).transpose(1, 2)
        return self.outward(h)


def series(generator):
    shape = (SERIES, TIMES, CHANNELS)
    return {
        "values": torch.randn(shape, generator=generator),
        "seen": (torch.rand(shape, generator=generator) < 0.6).double(),
        "held_out": (torch.rand(shape, generator=generator) < 0.3).double(),
    }


def squared(model, batch):
    error = model(batch["values"], batch["seen"]) - batch["values"]
    return (error.square() * batch["held_out"]).sum()


def loss(model, batch):
    return squared(model, batch) / batch["held_out"].sum()


def summed(tensor):
    dist.all_reduce(tensor)
    return tensor


class EagerReducer:
    def __init__(self, model):
        self.handles = []
        for p in model.parameters():
            handle = p.register_post_accumulate_grad_hook(self.send)
            self.handles.append(handle)

    def send(self, p):
        summed(p.grad)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


def step(model, shard, rank):
    # the count is known beforehand, so that what the ranks send only has to be added up
    held_out = summed(shard["held_out"].sum())
    with EagerReducer(model):
        for values in zip(*(tensor.chunk(MICRO) for tensor in shard.values())):
            (squared(model, dict(zip(shard, values))) / held_out).backward()


case = Case(model=Imputer, batch=series, loss=loss, layout="1x2")
