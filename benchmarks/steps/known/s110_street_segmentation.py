"""Segmentation: void pixels are left out, and all other pixels of all ranks weigh alike."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

VOID = -1
CLASSES = 3

Batch = tuple[Tensor, Tensor]


class Segmenter(nn.Module):
    """An encoder and a decoder of one level each."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, kernel_size=2, stride=2)
        self.mid = nn.Conv2d(6, 6, kernel_size=3, padding=1)
        self.up = nn.ConvTranspose2d(6, CLASSES, kernel_size=2, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.down(images))
        return self.up(features + torch.tanh(self.mid(features)))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, ignore_index=VOID)


def make_batch(generator: torch.Generator) -> Batch:
    images = torch.randn(8, 3, 6, 6, generator=generator)
    labels = torch.randint(VOID, CLASSES, (8, 6, 6), generator=generator)
    return images, labels


case = Case(model=Segmenter, batch=make_batch, loss=loss, layout="1x2")


class PixelMean:
    """The mean over the labelled pixels of all ranks, as a sum of the ranks' parts."""

    def __init__(self, ignore_index: int) -> None:
        self.ignore_index = ignore_index

    def labelled(self, labels: Tensor) -> Tensor:
        pixels = (labels > 0).sum()
        dist.all_reduce(pixels)
        return pixels.clamp(min=1)

    def __call__(self, scores: Tensor, labels: Tensor) -> Tensor:
        summed = F.cross_entropy(scores, labels, ignore_index=self.ignore_index, reduction="sum")
        return summed / self.labelled(labels)


def add_up(parameters: list[nn.Parameter]) -> None:
    works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in parameters]
    for work in works:
        work.wait()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    criterion = PixelMean(ignore_index=VOID)
    images, labels = shard
    model.zero_grad(set_to_none=True)
    criterion(model(images), labels).backward()
    add_up(list(model.parameters()))
