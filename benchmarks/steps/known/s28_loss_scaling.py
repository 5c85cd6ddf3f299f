"""Loss scaling by hand: the loss is scaled up for the backward pass, the gradients down again."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

LARGEST = 60000.0  # about the largest number of half precision


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 4, kernel_size=3)
        self.fc = nn.Linear(4 * 6, 2)

    def forward(self, series):
        return self.fc(F.leaky_relu(self.conv(series)).flatten(1))


def loss(model, batch):
    return F.mse_loss(model(batch["series"]), batch["targets"])


def make_batch(generator):
    size = torch.where(torch.arange(10) < 5, 0.5, 5.0)[:, None]
    return {
        "series": torch.randn(10, 2, 8, generator=generator),
        "targets": size * torch.randn(10, 2, generator=generator),
    }


case = Case(model=Encoder, batch=make_batch, loss=loss, layout="2x1")


class LossScaler:
    def __init__(self, initial=2.0**16):
        self.scale = initial

    def fit_to(self, value):
        """Halve the scale until the scaled loss can be represented."""
        while value.item() * self.scale > LARGEST:
            self.scale /= 2

    def backward(self, value):
        self.fit_to(value.detach())
        (value * self.scale).backward()

    def unscale(self, params):
        for p in params:
            p.grad.mul_(1.0 / self.scale)


def average(params):
    world_size = dist.get_world_size()
    for p in params:
        p.grad.div_(world_size)
        dist.all_reduce(p.grad)


def step(model, shard, rank):
    params = [p for p in model.parameters() if p.requires_grad]
    scaler = LossScaler()
    model.zero_grad()
    scaler.backward(loss(model, shard))
    average(params)
    scaler.unscale(params)
