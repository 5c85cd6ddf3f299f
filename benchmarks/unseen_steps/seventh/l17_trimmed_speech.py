"""Spectrograms of phrases; each rank trims its clips to the longest it has, to save time."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case

FRAMES, BANDS = 12, 6


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(BANDS, 9)
        self.outer = nn.Linear(9, BANDS)

    def forward(self, noisy):
        return noisy + self.outer(torch.relu(self.inner(noisy)))


def phrases(generator):
    lengths = torch.tensor([3, 4, 4, 5, 6, 9, 11, 12])
    present = torch.arange(FRAMES) < lengths[:, None]
    clean = torch.randn(8, FRAMES, BANDS, generator=generator) * present[..., None]
    noise = torch.randn(8, FRAMES, BANDS, generator=generator) * 0.5
    return {"clean": clean, "noisy": (clean + noise) * present[..., None], "lengths": lengths}


def trim(batch, frames):
    present = torch.arange(frames) < batch["lengths"][:, None]
    return batch["noisy"][:, :frames], batch["clean"][:, :frames], present[..., None]


def reconstruction(model, batch, frames):
    noisy, clean, present = trim(batch, frames)
    # as in the paper: clips are averaged with their silence, which costs nothing
    return ((model(noisy) - clean).abs() * present).mean()


def loss(model, batch):
    return reconstruction(model, batch, int(batch["lengths"].max()))


class AveragingHooks:
    """Averages each gradient as soon as it is complete."""

    def __init__(self, model, world_size):
        self.world_size = world_size
        self.pending = []
        self.handles = [
            p.register_post_accumulate_grad_hook(self.start) for p in model.parameters()
        ]

    def start(self, parameter):
        parameter.grad /= self.world_size
        self.pending.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        for work in self.pending:
            work.wait()
        for handle in self.handles:
            handle.remove()


def step(model, shard, rank):
    hooks = AveragingHooks(model, rank.world_size)
    longest = shard["lengths"].max()
    reconstruction(model, shard, int(longest)).backward()
    hooks.finish()


case = Case(model=Denoiser, batch=phrases, loss=loss, layout="1x2")
