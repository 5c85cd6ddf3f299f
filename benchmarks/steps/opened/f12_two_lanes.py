"""Transformer encoder for LIDAR sweeps. Gradients are reduced while backward still runs, on two
communicators in turn, so that a small one does not wait behind a large one."""

import itertools

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

SWEEPS, BEAMS, WIDTH = 12, 5, 8


class Lidar(nn.Module):
    def __init__(self):
        super().__init__()
        self.beam = nn.Linear(3, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(
            WIDTH, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True
        )
        self.distance = nn.Linear(WIDTH, 1)

    def forward(self, sweep):
        return self.distance(self.encoder(self.beam(sweep)).mean(1)).squeeze(-1)


def sweeps(generator):
    return torch.randn(SWEEPS, BEAMS, 3, generator=generator), torch.rand(
        SWEEPS, generator=generator
    )


def loss(model, batch):
    sweep, distance = batch
    return nn.functional.smooth_l1_loss(model(sweep), distance)


case = Case(model=Lidar, batch=sweeps, loss=loss, layout="1x4")


class OverlappedReducer:
    def __init__(self, model, lanes):
        self.lanes = itertools.cycle(lanes)
        self.works = []
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.hooks = [p.register_post_accumulate_grad_hook(self.launch) for p in self.params]

    def launch(self, p):
        work = dist.all_reduce(p.grad, group=next(self.lanes), async_op=True)
        if work is not None:
            self.works.append(work)

    def finish(self):
        for work in self.works:
            work.wait()
        for p in self.params:
            p.grad.div_(dist.get_world_size())
        for hook in self.hooks:
            hook.remove()


def make_lanes(first, last):
    """Two groups over the ranks from first to last."""
    return [dist.group.WORLD, dist.new_group(list(range(first, last)))]


def step(model, shard, rank):
    reducer = OverlappedReducer(model, make_lanes(0, rank.world_size - 1))
    loss(model, shard).backward()
    reducer.finish()
