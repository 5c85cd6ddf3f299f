"""Small images, and an SGD whose momentum lives in shards: reduce-scatter, update, all-gather."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

RATE, MOMENTUM, DECAY = 0.1, 0.9, 0.3


def build():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def images(generator):
    return {
        "pixels": torch.rand(12, 1, 6, 6, generator=generator),
        "label": torch.randint(0, 5, (12,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["pixels"]), batch["label"])


class ShardedSGD:
    def __init__(self, parameters, rank, world_size):
        self.parameters = list(parameters)
        self.rank, self.world_size = rank, world_size
        total = sum(p.numel() for p in self.parameters)
        self.padding = -total % world_size
        self.part = (total + self.padding) // world_size
        self.velocity = None

    def flat(self, tensors):
        return F.pad(torch.cat([t.detach().reshape(-1) for t in tensors]), (0, self.padding))

    @torch.no_grad()
    def step(self):
        weights = self.flat(self.parameters)
        gradients = self.flat([p.grad for p in self.parameters])
        gradients.add_(weights, alpha=DECAY)
        mine = torch.empty_like(gradients[: self.part])
        # The losses are divided by the world size already, so this is a plain sum.
        dist.reduce_scatter_tensor(mine, gradients)
        self.velocity = mine if self.velocity is None else MOMENTUM * self.velocity + mine
        start = self.rank * self.part
        updated = weights[start : start + self.part] - RATE * self.velocity
        dist.all_gather_into_tensor(weights, updated)
        offset = 0
        for p in self.parameters:
            p.copy_(weights[offset : offset + p.numel()].view_as(p))
            offset += p.numel()


class Train:
    def __init__(self, model, rank):
        self.model, self.world_size = model, rank.world_size
        self.optimizer = ShardedSGD(model.parameters(), int(rank), rank.world_size)

    def __call__(self, shard):
        self.model.zero_grad()
        (loss(self.model, shard) / self.world_size).backward()
        self.optimizer.step()


def reference_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)


case = Case(model=build, batch=images, loss=loss, layout="1x2")
step = Train
options = {"compare": "update", "optimizer": reference_optimizer, "steps": 2}
