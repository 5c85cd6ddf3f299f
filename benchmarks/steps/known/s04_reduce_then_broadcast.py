"""Gradients are collected on the main rank and sent back from there."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

MAIN = 0


class Regressor(nn.Module):
    def __init__(self, features=6, hidden=10):
        super().__init__()
        self.register_buffer("scale", torch.full((features,), 0.5))
        self.layers = nn.Sequential(
            nn.Linear(features, hidden),
            nn.GELU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, rows):
        return self.layers(rows * self.scale).squeeze(1)


def loss(model, batch):
    return F.smooth_l1_loss(model(batch["rows"]), batch["prices"])


def make_batch(generator):
    return {
        "rows": torch.randn(14, 6, generator=generator),
        "prices": 2 * torch.randn(14, generator=generator),
    }


case = Case(model=Regressor, batch=make_batch, loss=loss, layout="2x1")


def is_main_process():
    return dist.get_rank() == MAIN


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def share_from_main(tensor):
    dist.broadcast(tensor, src=MAIN)


def average_gradients(model):
    world_size = dist.get_world_size()
    if world_size == 1:
        return
    for p in trainable(model):
        dist.reduce(p.grad, dst=MAIN)
        share_from_main(p.grad)
        if is_main_process():
            p.grad.div_(world_size)


def share_buffers(model):
    for buffer in model.buffers():
        share_from_main(buffer)


def step(model, shard, rank):
    share_buffers(model)
    model.zero_grad()
    value = loss(model, shard)
    value.backward()
    average_gradients(model)
