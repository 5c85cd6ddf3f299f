"""Residual blocks whose activations are computed again in the backward pass, to save memory."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


class Recompute(torch.autograd.Function):
    """Runs a block without storing its activations."""

    @staticmethod
    def forward(ctx, x, block, *params):
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach()
            output = ctx.block(x)
        torch.autograd.backward(output, gradient)
        return (x.grad, None) + (None,) * len(list(ctx.block.parameters()))


class ResidualNet(nn.Module):
    def __init__(self, width=6, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.inp = nn.Linear(4, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 9), nn.GELU(), nn.Linear(9, width)) for _ in range(2)
        )
        self.out = nn.Linear(width, 3)

    def run_block(self, block, x):
        if self.recompute and self.training:
            return Recompute.apply(x, block, *block.parameters())
        return block(x)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + self.run_block(block, x)
        return self.out(x)


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def make_batch(generator):
    return {
        "x": torch.randn(10, 4, generator=generator),
        "y": torch.randint(0, 3, (10,), generator=generator),
    }


case = Case(model=ResidualNet, batch=make_batch, loss=loss, layout="1x2")


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def step(model, shard, rank):
    model.recompute = True
    loss(model, shard).backward()
    average_gradients(model)
