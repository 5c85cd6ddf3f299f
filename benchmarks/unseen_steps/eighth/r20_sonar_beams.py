"""Direction of a sound source from an array of hydrophones. Steering matrices are stored column by column."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

PINGS, PHONES, BEAMS = 20, 6, 8


def column_major(rows, columns):
    """The way the beamformer on the vessel wants to read it."""
    return nn.Parameter((torch.randn(columns, rows) / columns**0.5).t())


class Beamformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.real = column_major(BEAMS, PHONES)
        self.imaginary = column_major(BEAMS, PHONES)
        self.read_out = nn.Linear(BEAMS, 2)

    def forward(self, real, imaginary):
        in_phase = real @ self.real.T - imaginary @ self.imaginary.T
        quadrature = real @ self.imaginary.T + imaginary @ self.real.T
        power = in_phase.square() + quadrature.square()
        return self.read_out((power + 1e-3).log())


def make_batch(generator):
    angle = torch.rand(PINGS, generator=generator) * 6.283
    return {
        "real": torch.randn(PINGS, PHONES, generator=generator),
        "imaginary": torch.randn(PINGS, PHONES, generator=generator),
        "direction": torch.stack([angle.cos(), angle.sin()], dim=1),
    }


def loss(model, batch):
    direction = model(batch["real"], batch["imaginary"])
    return (direction - batch["direction"]).square().sum(-1).mean()


class Averager:
    def __init__(self, world_size):
        self.world_size = world_size
        self.bytes_sent = 0

    def average_(self, tensor):
        # collectives take dense tensors only
        dense = tensor.contiguous()
        dist.all_reduce(dense)
        dense.div_(self.world_size)
        self.bytes_sent += dense.numel() * dense.element_size()

    def __call__(self, parameters):
        for parameter in parameters:
            if parameter.grad is not None:
                self.average_(parameter.grad)


def step(model, shard, rank):
    average = Averager(rank.world_size)
    loss(model, shard).backward()
    average(model.parameters())


case = Case(model=Beamformer, batch=make_batch, loss=loss, layout="1x2")
