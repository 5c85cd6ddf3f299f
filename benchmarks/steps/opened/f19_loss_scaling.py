"""Loss scaling for half-precision runs: the scale follows the size of the loss."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass(frozen=True)
class ScalingConfig:
    target: float = 2.0**15
    max_scale: float = 2.0**24


class DepthNet(nn.Module):
    """Per-pixel depth from a small colour image."""

    def __init__(self, width=6):
        super().__init__()
        self.encode = nn.Conv2d(3, width, 3, padding=1)
        self.refine = nn.Conv2d(width, width, 3, padding=1)
        self.depth = nn.Conv2d(width, 1, 1)

    def forward(self, images):
        x = F.silu(self.encode(images))
        x = x + F.silu(self.refine(x))
        return self.depth(x).squeeze(1)


def depth_loss(model, batch):
    difference = model(batch["images"]) - batch["depth"]
    return (difference.square() / (1 + batch["depth"].abs())).mean()


class PowerOfTwoScaler:
    """Brings the scaled loss close to `target`, so that small gradients survive in half."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.scale = 1.0

    def adapt(self, loss):
        size = max(abs(loss.item()), 1e-12)
        exponent = math.floor(math.log2(self.cfg.target / size))
        self.scale = min(2.0**exponent, self.cfg.max_scale)

    def backward(self, loss):
        (loss * self.scale).backward()

    def unscale_(self, parameters):
        for parameter in parameters:
            parameter.grad.mul_(1.0 / self.scale)


class BucketReducer:
    def __init__(self, parameters, bucket_elements=200):
        self.buckets = [[]]
        for parameter in parameters:
            if sum(p.numel() for p in self.buckets[-1]) >= bucket_elements:
                self.buckets.append([])
            self.buckets[-1].append(parameter)

    def run(self):
        for bucket in self.buckets:
            flat = torch.cat([p.grad.flatten() for p in bucket])
            dist.all_reduce(flat, op=dist.ReduceOp.SUM)
            flat /= dist.get_world_size()
            for parameter, piece in zip(
                bucket, flat.split([p.numel() for p in bucket]), strict=True
            ):
                parameter.grad.copy_(piece.view_as(parameter))


class DepthTrainer:
    def __init__(self, model, cfg=None):
        self.model = model
        self.scaler = PowerOfTwoScaler(cfg or ScalingConfig())
        self.reducer = BucketReducer(model.parameters())

    def train_step(self, batch):
        loss = depth_loss(self.model, batch)
        self.scaler.adapt(loss.detach())
        self.scaler.backward(loss)
        self.reducer.run()
        self.scaler.unscale_(self.model.parameters())
        return loss.item()


def make_batch(generator):
    images = torch.randn(8, 3, 5, 5, generator=generator)
    distance = torch.tensor([0.5, 0.8, 0.6, 1.0, 8.0, 12.0, 9.0, 15.0]).view(8, 1, 1)
    depth = distance * (1 + 0.2 * torch.rand(8, 5, 5, generator=generator))
    return {"images": images, "depth": depth}


case = Case(model=DepthNet, batch=make_batch, loss=depth_loss, layout="1x2")


def step(model, shard, rank):
    DepthTrainer(model).train_step(shard)
