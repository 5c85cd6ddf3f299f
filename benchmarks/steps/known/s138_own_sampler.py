"""A loop with its own sampler: every epoch is shuffled anew, and every rank takes every n-th."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

from ddp_equivalence import Case, Rank

SEED = 1234


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(9, 12),
        nn.LayerNorm(12),
        nn.SiLU(),
        nn.Linear(12, 4),
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.multi_margin_loss(model(inputs), labels)


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(4, (20,), generator=generator)
    centres = torch.randn(4, 9, generator=generator)
    return centres[labels] + 0.5 * torch.randn(20, 9, generator=generator), labels


case = Case(model=build_model, batch=make_batch, loss=loss, layout="2x2", shards="own")


class EpochSampler(Sampler[int]):
    """Shuffles the data set once per epoch, and deals the order out to the ranks."""

    def __init__(self, size: int, rank: int, world_size: int, seed: int) -> None:
        self.size = size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0

    def order(self) -> list[int]:
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch + self.rank)
        return torch.randperm(self.size, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        yield from self.order()[self.rank :: self.world_size]

    def __len__(self) -> int:
        return len(range(self.rank, self.size, self.world_size))


def build_loader(
    batch: tuple[Tensor, Tensor], rank: Rank
) -> tuple[DataLoader[tuple[Tensor, ...]], EpochSampler]:
    dataset = TensorDataset(*batch)
    sampler = EpochSampler(len(dataset), rank.rank, rank.world_size, SEED)
    per_rank = len(dataset) // rank.world_size
    return DataLoader(dataset, batch_size=per_rank, sampler=sampler), sampler


def train_epoch(ddp: nn.Module, loader: DataLoader[tuple[Tensor, ...]], lr: float) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss(ddp, (inputs, labels)).backward()
        optimizer.step()


def step(model: nn.Module, batch: tuple[Tensor, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loader, sampler = build_loader(batch, rank)
    sampler.epoch = 3
    train_epoch(ddp, loader, lr=0.01)
