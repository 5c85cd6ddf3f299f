"""Training from a stream of files, of which every rank reads its own ones."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from ddp_equivalence import Case, Rank

EXAMPLES_IN_A_FILE = 4
Example = tuple[Tensor, Tensor]
Item = TypeVar("Item")


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["features"]), batch["label"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "features": torch.randn(32, 7, generator=generator),
        "label": torch.randint(0, 3, (32,), generator=generator),
    }


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2", shards="own")


class FileStream(IterableDataset[Example]):
    """Yields the examples of the files that belong to a rank, one file after the other."""

    def __init__(self, files: list[list[Example]], rank: int, world_size: int) -> None:
        self.files = files[rank::world_size]

    def __iter__(self) -> Iterator[Example]:
        for file in self.files:
            yield from file


@dataclass
class Loader:
    stream: FileStream
    batch_size: int
    rank: int
    world_size: int

    def examples(self) -> Iterator[Example]:
        return islice(self.stream, self.rank, None, self.world_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for group in batched(self.examples(), self.batch_size):
            features, labels = zip(*group, strict=True)
            yield {"features": torch.stack(features), "label": torch.stack(labels)}


def written_files(data: dict[str, Tensor]) -> list[list[Example]]:
    examples = zip(data["features"], data["label"], strict=True)
    return list(batched(examples, EXAMPLES_IN_A_FILE))


def train_window(ddp: DistributedDataParallel, loader: Loader) -> None:
    """One optimizer step from all batches of the loader."""
    batches = list(loader)
    with ddp.no_sync():
        for batch in batches[:-1]:
            (loss(ddp, batch) / len(batches)).backward()
    (loss(ddp, batches[-1]) / len(batches)).backward()


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    stream = FileStream(written_files(shard), rank.rank, rank.world_size)
    loader = Loader(stream, batch_size=4, rank=rank.rank, world_size=rank.world_size)
    train_window(DistributedDataParallel(model), loader)
