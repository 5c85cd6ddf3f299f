"""A thumbnail classifier with a sampler of its own and a loss over the examples of one epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_equivalence import Case

IMAGES, CLASSES, SIZE = 14, 4, 5


class Thumbnails(Dataset):
    def __init__(self, batch) -> None:
        self.pixels, self.labels = batch["pixels"], batch["labels"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.pixels[index], self.labels[index]


class EpochSampler(Sampler[int]):
    """Deals a permutation of the data set, the same on all ranks, to the ranks in turn."""

    def __init__(self, dataset: Dataset, seed: int = 0) -> None:
        self.rank, self.num_replicas = dist.get_rank(), dist.get_world_size()
        self.length = len(dataset)
        self.num_samples = math.ceil(self.length / self.num_replicas)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        indices = torch.randperm(self.length, generator=generator).tolist()
        indices += indices[: self.num_samples * self.num_replicas - self.length]
        return iter(indices[self.rank :: self.num_replicas])


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, pixels):
        features = F.silu(self.norm(self.stem(pixels)))
        return self.head(features.mean(dim=(2, 3)))


def make_batch(generator):
    return {
        "pixels": torch.randn(IMAGES, 1, SIZE, SIZE, generator=generator),
        "labels": torch.randint(CLASSES, (IMAGES,), generator=generator),
    }


def mean_cross_entropy(model, batch):
    return F.cross_entropy(model(batch["pixels"]), batch["labels"])


case = Case(
    model=Classifier, batch=make_batch, loss=mean_cross_entropy, layout="1x3", shards="own"
)


class FullBatchEpoch:
    """One optimizer step for every epoch: gradients of all micro-batches are collected."""

    def __init__(self, model: nn.Module, dataset: Thumbnails, micro_batch: int = 16) -> None:
        self.ddp = DistributedDataParallel(model)
        self.dataset = dataset
        self.sampler = EpochSampler(dataset)
        self.loader = DataLoader(dataset, batch_size=micro_batch, sampler=self.sampler)

    def scale(self) -> float:
        return dist.get_world_size() / len(self.dataset)

    def run(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)
        for pixels, labels in self.loader:
            summed = F.cross_entropy(self.ddp(pixels), labels, reduction="sum")
            (summed * self.scale()).backward()


def step(model, batch, rank):
    FullBatchEpoch(model, Thumbnails(batch)).run(epoch=0)
