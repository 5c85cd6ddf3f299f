"""Streams of different lengths: a rank whose stream has ended joins early, and the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

ROWS = 4  # of one stream, at one time
LENGTHS = (3, 1, 2, 3)  # of the four streams


def streams_at(time: int) -> list[int]:
    return [stream for stream, length in enumerate(LENGTHS) if length > time]


ROWS_AT = tuple(ROWS * len(streams_at(time)) for time in range(max(LENGTHS)))


@dataclass(frozen=True)
class Stream:
    """The windows of one stream, cut out of those of all streams, which are sorted by time."""

    number: int
    windows: Tensor
    levels: Tensor

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for time in range(LENGTHS[self.number]):
            place = sum(ROWS_AT[:time]) + streams_at(time).index(self.number) * ROWS
            rows = slice(place, place + ROWS)
            yield self.windows[rows], self.levels[rows]


class Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trend = nn.Linear(8, 2)
        self.waves = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 2))

    def forward(self, windows: Tensor) -> Tensor:
        return self.trend(windows) + self.waves(windows)


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    walk = 0.5 * torch.randn(sum(ROWS_AT), 10, generator=generator).cumsum(1)
    return {"windows": walk[:, :8], "levels": walk[:, 8:]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["windows"]), batch["levels"])


def make_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, weight_decay=0.01)


def train(ddp: DistributedDataParallel, stream: Stream) -> int:
    optimizer = make_optimizer(ddp.parameters())
    steps = 0
    with Join([ddp]):
        for windows, levels in stream:
            optimizer.zero_grad()
            loss(ddp, {"windows": windows, "levels": levels}).backward()
            optimizer.step()
            steps += 1
    return steps


def step(model: nn.Module, batch: dict[str, Tensor], rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    stream = Stream(rank.rank, batch["windows"], batch["levels"])
    # The ranks that joined early receive the final weights of the last one.
    assert train(ddp, stream) == LENGTHS[rank.rank]


case = Case(model=Forecast, batch=batch, loss=loss, layout="1x4", shards="own")
options = {"compare": "update", "optimizer": make_optimizer, "steps": ROWS_AT}
