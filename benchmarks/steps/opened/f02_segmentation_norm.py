"""Semantic segmentation with a batch normalization that shares its statistics between ranks (CPU)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

CLASSES = 4


class SharedBatchNorm2d(nn.Module):
    """Statistics over the images of all ranks; needs equally many pixels on each."""

    def __init__(self, channels, eps=1e-5, momentum=0.1):
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def moments(self, x):
        dims = (0, 2, 3)
        mean = x.mean(dims)
        var = x.var(dims, unbiased=False)
        if dist.is_initialized() and dist.get_world_size() > 1:
            packed = all_reduce(torch.stack([mean, var])) / dist.get_world_size()
            mean, var = packed.unbind(0)
        return mean, var

    def forward(self, x):
        if self.training:
            mean, var = self.moments(x)
            with torch.no_grad():
                self.running_mean.lerp_(mean.detach(), self.momentum)
                self.running_var.lerp_(var.detach(), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        return x * scale[None, :, None, None] + shift[None, :, None, None]


def conv_block(c_in, c_out, stride=1):
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False),
        SharedBatchNorm2d(c_out),
        nn.SiLU(),
    )


class SegmentationNet(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.stem = conv_block(3, width)
        self.down = conv_block(width, 2 * width, stride=2)
        self.head = nn.Conv2d(2 * width, CLASSES, 1)

    def forward(self, images):
        features = self.down(self.stem(images))
        return F.interpolate(self.head(features), size=images.shape[-2:], mode="nearest")


def make_batch(generator):
    brightness = torch.linspace(-1.0, 1.5, 8).view(8, 1, 1, 1)
    images = torch.randn(8, 3, 6, 6, generator=generator) + brightness
    masks = torch.randint(CLASSES, (8, 6, 6), generator=generator)
    return {"images": images, "masks": masks}


def segmentation_loss(model, batch):
    return F.cross_entropy(model(batch["images"]), batch["masks"])


class SegmentationTrainer:
    def __init__(self, model):
        self.ddp = DistributedDataParallel(model, broadcast_buffers=False)

    def run_step(self, batch):
        self.ddp.train()
        loss = segmentation_loss(self.ddp, batch)
        loss.backward()
        return loss.item()


case = Case(model=SegmentationNet, batch=make_batch, loss=segmentation_loss, layout="1x2")


def step(model, shard, rank):
    SegmentationTrainer(model).run_step(shard)
