"""Forecasting: windows of one long series, of which every rank takes a stretch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddp_equivalence import Case, Rank

CHANNELS, LENGTH = 3, 24


@dataclass(frozen=True)
class WindowConfig:
    context: int = 4
    horizon: int = 2

    @property
    def span(self) -> int:
        return self.context + self.horizon


WINDOW = WindowConfig()


class Forecaster(nn.Module):
    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Linear(WINDOW.context * CHANNELS, width)
        self.head = nn.Linear(width, WINDOW.horizon * CHANNELS)

    def forward(self, context: Tensor) -> Tensor:
        hidden = torch.tanh(self.encoder(context.flatten(1)))
        return self.head(hidden).view(-1, WINDOW.horizon, CHANNELS)


class SlidingWindows(Dataset):
    """All windows that start at `first` or later, and before `stop`."""

    def __init__(self, series: Tensor, config: WindowConfig, first: int, stop: int) -> None:
        self.series, self.config = series, config
        self.first, self.stop = first, stop

    def __len__(self) -> int:
        return max(self.stop - self.first, 0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self.first + index
        middle = start + self.config.context
        return self.series[start:middle], self.series[middle : start + self.config.span]


def window_count(length: int, config: WindowConfig) -> int:
    return length - config.span + 1


def huber_sum(model: nn.Module, windows: SlidingWindows) -> Tensor:
    """The loss of all windows of a data set, summed over windows."""
    loader = DataLoader(windows, batch_size=max(len(windows), 1))
    context, future = next(iter(loader))
    error = nn.functional.huber_loss(model(context), future, reduction="none", delta=0.5)
    return error.mean(dim=(1, 2)).sum()


def loss(model: nn.Module, series: Tensor) -> Tensor:
    windows = window_count(len(series), WINDOW)
    return huber_sum(model, SlidingWindows(series, WINDOW, 0, windows)) / windows


def make_series(generator: torch.Generator) -> Tensor:
    steps = torch.randn(LENGTH, CHANNELS, generator=generator)
    return 0.5 * steps.cumsum(dim=0)


case = Case(model=Forecaster, batch=make_series, loss=loss, layout="1x2", shards="own")


class ForecastModule:
    """Data and training of one rank."""

    def __init__(self, model: nn.Module, series: Tensor, rank: Rank) -> None:
        self.rank = rank
        self.series = series
        self.total_windows = window_count(len(series), WINDOW)
        self.model = DistributedDataParallel(model)

    def setup(self) -> SlidingWindows:
        """The stretch of the series that belongs to this rank, cut into windows."""
        stretch = len(self.series) // self.rank.world_size
        first = self.rank * stretch
        stop = first + stretch - WINDOW.span + 1
        return SlidingWindows(self.series, WINDOW, first, stop)

    def training_step(self) -> None:
        weight = self.rank.world_size / self.total_windows
        (weight * huber_sum(self.model, self.setup())).backward()


def step(model: nn.Module, series: Tensor, rank: Rank) -> None:
    ForecastModule(model, series, rank).training_step()
