"""Speech enhancement with a mask-predicting network and hand-written loss scaling.
Replicas without DDP: scaled gradients are summed over ranks in one flat tensor, then unscaled."""
import math

import torch
import torch.distributed as dist
from torch import nn
from ddp_equivalence import Case

BINS, FRAMES = 8, 9
TARGET_LOSS = 2.0**10


class MaskNet(nn.Module):
    def __init__(self, width=14):
        super().__init__()
        self.inp = nn.Conv1d(BINS, width, kernel_size=3, padding=1)
        self.mid = nn.Conv1d(width, width, kernel_size=3, padding=2, dilation=2)
        self.out = nn.Conv1d(width, BINS, kernel_size=1)

    def forward(self, noisy):
        h = torch.tanh(self.inp(torch.log1p(noisy)))
        h = h + torch.tanh(self.mid(h))
        return noisy * torch.sigmoid(self.out(h))


def build_model():
    return MaskNet()


def spectral_loss(model, batch):
    estimate = model(batch["noisy"])
    linear = (estimate - batch["clean"]).square().mean()
    compressed = ((estimate + 1e-3).sqrt() - (batch["clean"] + 1e-3).sqrt()).square().mean()
    return linear + 0.3 * compressed


def loss(model, batch):
    return spectral_loss(model, batch)


def make_batch(generator):
    rows = 12
    level = torch.logspace(-1.0, 0.7, rows).view(rows, 1, 1)
    clean = level * torch.rand(rows, BINS, FRAMES, generator=generator)
    noise = 0.5 * level * torch.rand(rows, BINS, FRAMES, generator=generator)
    return {"clean": clean, "noisy": clean + noise}


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")


class LossScaler:
    """Power of two which brings the loss near TARGET_LOSS."""

    def __init__(self):
        self.scale = 1.0

    def update(self, value):
        magnitude = max(float(value), 1e-12)
        self.scale = 2.0 ** math.floor(math.log2(TARGET_LOSS / magnitude))

    def apply(self, value):
        return value * self.scale

    @torch.no_grad()
    def unscale_(self, flat):
        flat.div_(self.scale)


def flatten(params):
    return torch.cat([p.grad.reshape(-1) for p in params])


@torch.no_grad()
def write_back(flat, params):
    offset = 0
    for p in params:
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def step(model, shard, rank):
    params = list(model.parameters())
    scaler = LossScaler()
    objective = spectral_loss(model, shard)
    scaler.update(objective.detach())
    scaler.apply(objective).backward()

    flat = flatten(params)
    dist.all_reduce(flat)
    scaler.unscale_(flat)
    flat.div_(rank.world_size)
    write_back(flat, params)
    return
