"""Gradients are sent as soon as they are ready, while the backward pass goes on."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


class ResidualMlp(nn.Module):
    def __init__(self, width=7, depth=3):
        super().__init__()
        self.inlet = nn.Linear(5, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.outlet = nn.Linear(width, 2)

    def forward(self, x):
        hidden = self.inlet(x)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.outlet(hidden)


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def make_batch(generator):
    return {
        "x": torch.randn(12, 5, generator=generator),
        "y": torch.randn(12, 2, generator=generator),
    }


case = Case(model=ResidualMlp, batch=make_batch, loss=loss, layout="2x1")


class OverlappedReducer:
    """Starts an all-reduce of every gradient from its hook, and collects the results later."""

    def __init__(self, model):
        self.world_size = dist.get_world_size()
        self.pending = {}
        self.handles = [
            p.register_post_accumulate_grad_hook(self.launch)
            for p in model.parameters()
            if p.requires_grad
        ]

    def launch(self, p):
        wire = p.grad / self.world_size
        work = dist.all_reduce(wire, async_op=True)
        self.pending[p.shape] = (p, wire, work)

    def finish(self):
        for p, wire, work in self.pending.values():
            work.wait()
            p.grad.copy_(wire)
        self.pending.clear()

    def close(self):
        for handle in self.handles:
            handle.remove()


def step(model, shard, rank):
    reducer = OverlappedReducer(model)
    model.zero_grad()
    loss(model, shard).backward()
    reducer.finish()
    reducer.close()
    dist.barrier()
