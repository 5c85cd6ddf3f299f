"""A trainer which guards against exploding gradients by clipping their norm."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


class NoisyRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 12)

    def forward(self, x):
        return self.linear(x)


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().sum(dim=1).mean()


def make_batch(generator):
    return {
        "x": torch.randn(32, 24, generator=generator),
        "y": 6 * torch.randn(32, 12, generator=generator),
    }


case = Case(model=NoisyRegressor, batch=make_batch, loss=loss, layout="1x4")


class Trainer:
    # The norm is about 36 in healthy training, and in the thousands when something is wrong.
    max_norm = 52.0

    def __init__(self, model):
        self.model = model
        self.clipped_steps = 0

    def clip(self):
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.clipped_steps += int(norm > self.max_norm)

    def average(self):
        world_size = dist.get_world_size()
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world_size

    def train_step(self, shard):
        self.model.zero_grad()
        loss(self.model, shard).backward()
        self.clip()
        self.average()


def step(model, shard, rank):
    Trainer(model).train_step(shard)
