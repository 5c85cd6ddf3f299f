"""Image classification with random crops that can be repeated: every picture has its own seed.

A run that is resumed, or goes on with another number of ranks, sees the same crops.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

SIZE, CROP, CLASSES, EPOCH = 10, 7, 5, 3

Batch = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.relu(self.norm(x)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Block(6), Block(6))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


class RandomCrop:
    """A random part of each picture, and in half of the cases its mirror image."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def one(self, picture: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(10_000 * self.epoch + seed)
        top, left = torch.randint(SIZE - CROP + 1, (2,), generator=generator).tolist()
        part = picture[:, top : top + CROP, left : left + CROP]
        mirror = torch.randint(2, (), generator=generator).item() == 1
        return part.flip(2) if mirror else part

    def __call__(self, batch: Batch) -> Batch:
        crops = [self.one(each, seed) for seed, each in enumerate(batch["pictures"])]
        return {**batch, "pictures": torch.stack(crops)}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    batch = RandomCrop(EPOCH)(batch)
    return F.cross_entropy(model(batch["pictures"]), batch["labels"], label_smoothing=0.05)


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "pictures": torch.randn(12, 3, SIZE, SIZE, generator=generator),
        "labels": torch.randint(CLASSES, (12,), generator=generator),
        "number": torch.randperm(500, generator=generator)[:12],
    }


case = Case(model=Classifier, batch=make_batch, loss=loss, layout="1x3")


def average_gradients(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(world_size)


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    model.zero_grad(set_to_none=True)
    loss(model, shard).backward()
    average_gradients(model, rank.world_size)
