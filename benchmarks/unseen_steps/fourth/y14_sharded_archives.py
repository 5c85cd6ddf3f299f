"""Image classification from archives, as with webdataset: every rank reads archives of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from ddp_equivalence import Case, Rank

ARCHIVES, IMAGES_PER_ARCHIVE, SIZE, CLASSES = 8, 3, 5, 4

Archives = dict[str, Tensor]


@dataclass(frozen=True)
class DistributedContext:
    """What launcher and machine say about this process."""

    index: int
    processes: int
    node: int
    is_main: bool

    @classmethod
    def of(cls, rank: Rank) -> DistributedContext:
        return cls(
            index=rank.local_rank,
            processes=rank.world_size,
            node=rank.node,
            is_main=rank == 0,
        )


class Classifier(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(width * (SIZE - 2) ** 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


class ArchiveDataset(IterableDataset):
    """Streams the samples of every n-th archive, beginning with that of this process."""

    def __init__(self, archives: Archives, context: DistributedContext) -> None:
        self.archives = archives
        self.context = context

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        every = range(len(self.archives["images"]))
        for archive in every[self.context.index :: self.context.processes]:
            yield from zip(
                self.archives["images"][archive], self.archives["labels"][archive], strict=True
            )


def loss(model: nn.Module, archives: Archives) -> Tensor:
    logits = model(archives["images"].flatten(0, 1))
    return F.cross_entropy(logits, archives["labels"].flatten(), label_smoothing=0.1)


def make_archives(generator: torch.Generator) -> Archives:
    count = (ARCHIVES, IMAGES_PER_ARCHIVE)
    return {
        "images": torch.randn(*count, 3, SIZE, SIZE, generator=generator),
        "labels": torch.randint(CLASSES, count, generator=generator),
    }


case = Case(model=Classifier, batch=make_archives, loss=loss, layout="2x2", shards="own")


class Trainer:
    def __init__(self, model: nn.Module, archives: Archives, rank: Rank) -> None:
        self.context = DistributedContext.of(rank)
        batch_size = ARCHIVES * IMAGES_PER_ARCHIVE // self.context.processes
        self.loader = DataLoader(ArchiveDataset(archives, self.context), batch_size=batch_size)
        self.model = DistributedDataParallel(model)

    def run(self) -> None:
        for images, labels in self.loader:
            logits = self.model(images)
            objective = F.cross_entropy(logits, labels, label_smoothing=0.1)
            objective.backward()
            if self.context.is_main:
                self.last_loss = objective.item()


def step(model: nn.Module, archives: Archives, rank: Rank) -> None:
    Trainer(model, archives, rank).run()
