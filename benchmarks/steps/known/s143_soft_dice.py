"""Segmentation with a soft Dice loss over the pixels of the whole batch, on all ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

CLASSES = 3
SMOOTH = 1.0

Batch = dict[str, Tensor]


class Segmenter(nn.Module):
    """Two scales; the coarse one is interpolated and added."""

    def __init__(self, channels: int = 5) -> None:
        super().__init__()
        self.fine = nn.Conv2d(2, channels, 3, padding=1)
        self.coarse = nn.Conv2d(channels, channels, 3, padding=1, stride=2)
        self.classify = nn.Conv2d(channels, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = F.leaky_relu(self.fine(images))
        coarse = F.leaky_relu(self.coarse(fine))
        coarse = F.interpolate(coarse, size=fine.shape[-2:], mode="nearest")
        return self.classify(fine + coarse).softmax(1)


def overlap_and_area(probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Both by class, summed over images and pixels."""
    truth = F.one_hot(labels, CLASSES).permute(0, 3, 1, 2).to(probabilities.dtype)
    overlap = (probabilities * truth).sum((0, 2, 3))
    return overlap, (probabilities + truth).sum((0, 2, 3))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    overlap, area = overlap_and_area(model(batch["images"]), batch["labels"])
    return 1 - ((2 * overlap + SMOOTH) / (area + SMOOTH)).mean()


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "images": torch.randn(6, 2, 8, 8, generator=generator),
        "labels": torch.randint(CLASSES, (6, 8, 8), generator=generator),
    }


case = Case(model=Segmenter, batch=make_batch, loss=loss, layout="1x3")


class GlobalDice(nn.Module):
    """The Dice loss of the batch on all ranks. Every rank returns the same number."""

    def __init__(self, smooth: float = SMOOTH) -> None:
        super().__init__()
        self.smooth = smooth

    def sums(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        overlap, area = overlap_and_area(probabilities, labels)
        return torch.stack([2 * overlap, area]) + self.smooth

    def forward(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        sums = all_reduce(self.sums(probabilities, labels))
        return 1 - (sums[0] / sums[1]).mean()


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    criterion = GlobalDice()
    ddp.zero_grad()
    value = criterion(ddp(shard["images"]), shard["labels"])
    value.backward()
