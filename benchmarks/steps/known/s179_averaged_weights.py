"""Trains a classifier and keeps a moving average of its weights, with which it is validated."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

DECAY = 0.99

Batch = dict[str, Tensor]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 4))


class Resumed(nn.Module):
    """A network and the moving average of its weights, as a checkpoint holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.online = network()
        self.average = copy.deepcopy(self.online).requires_grad_(False)
        for parameter in self.average.parameters():
            parameter += 0.2 * torch.randn_like(parameter)  # the average lags behind

    def forward(self, rows: Tensor) -> Tensor:
        return self.online(rows)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["rows"]), batch["label"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "rows": torch.randn(16, 7, generator=generator),
        "label": torch.randint(4, (16,), generator=generator),
    }


case = Case(model=Resumed, batch=make_batch, loss=loss, layout="2x2")


class MovingAverage:
    def __init__(self, model: Resumed) -> None:
        self.online = list(model.online.parameters())
        self.average = list(model.average.parameters())

    @torch.no_grad()
    def _load(self, weights: Iterable[Tensor]) -> None:
        for parameter, weight in zip(self.online, weights, strict=True):
            parameter.copy_(weight)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The network has the averaged weights in this context, and its own ones afterwards."""
        trained = [parameter.detach() for parameter in self.online]
        self._load(self.average)
        yield
        self._load(trained)

    @torch.no_grad()
    def update(self) -> None:
        for average, parameter in zip(self.average, self.online, strict=True):
            average.lerp_(parameter, 1 - DECAY)


@torch.no_grad()
def accuracy(model: nn.Module, batch: Batch) -> float:
    return (model(batch["rows"]).argmax(dim=1) == batch["label"]).double().mean().item()


def step(model: Resumed, shard: Batch, rank: Rank) -> None:
    average = MovingAverage(model)
    with average.applied():
        accuracy(model, shard)
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    average.update()
