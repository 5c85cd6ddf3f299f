"""A convolution that is too wide for one rank: its channels are divided, the images are not kept."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_equivalence import Case

CHANNELS, WIDTH, GROUPS, CLASSES, SIZE, IMAGES = 3, 16, 4, 5, 5, 12


def gather_images(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, in their order."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


class ChannelsToImages(torch.autograd.Function):
    """From some channels of all images to all channels of the rank's own images."""

    @staticmethod
    def forward(ctx, part):
        world_size, rank = dist.get_world_size(), dist.get_rank()
        by_channels = gather_images(part).chunk(world_size)
        return torch.cat([some.chunk(world_size)[rank] for some in by_channels], dim=1)

    @staticmethod
    def backward(ctx, grad_output):
        everything = gather_images(grad_output)
        return everything.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


class WideBlock(nn.Module):
    """Convolution, group norm and activation, on a slice of the channels once it is divided."""

    def __init__(self, in_channels: int, width: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.width, self.groups = width, groups
        self.divided = False

    def mine(self) -> slice:
        if not self.divided:
            return slice(0, self.width)
        per_rank = self.width // dist.get_world_size()
        return slice(dist.get_rank() * per_rank, (dist.get_rank() + 1) * per_rank)

    def forward(self, images):
        mine = self.mine()
        x = gather_images(images) if self.divided else images
        x = F.conv2d(x, self.conv.weight[mine], self.conv.bias[mine], padding=1)
        x = F.group_norm(x, self.groups, self.scale[mine], self.shift[mine])
        x = F.silu(x)
        return ChannelsToImages.apply(x) if self.divided else x


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = WideBlock(CHANNELS, WIDTH, GROUPS)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        return self.head(self.block(images).amax(dim=(2, 3)))


def image_loss(model, batch):
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def make_batch(generator):
    return {
        "images": torch.randn(IMAGES, CHANNELS, SIZE, SIZE, generator=generator),
        "labels": torch.randint(CLASSES, (IMAGES,), generator=generator),
    }


case = Case(model=Classifier, batch=make_batch, loss=image_loss, layout="1x2")


class ChannelParallel:
    def __init__(self, model: Classifier) -> None:
        self.model = model
        model.block.divided = True

    def collect_gradients(self) -> None:
        """Adds the slices of the block, which are disjoint, and the parts of the head."""
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())

    def train_step(self, batch) -> None:
        image_loss(self.model, batch).backward()
        self.collect_gradients()


def step(model, shard, rank):
    ChannelParallel(model).train_step(shard)
