"""A recurrent forecast of many series, time first. Exploding gradients are cut by hooks."""

from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

HISTORY, HORIZON = 12, 3
Batch = dict[str, Tensor]


class Forecaster(nn.Module):
    """Reads the history of every series, and predicts the next values at once."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(1, 6)
        self.future = nn.Linear(6, HORIZON)

    def forward(self, history: Tensor) -> Tensor:
        level = history.mean(0)
        states, _ = self.cell((history - level).unsqueeze(-1))
        return self.future(states[-1]).T + level


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.huber_loss(model(batch["history"]), batch["future"], delta=0.5)


def make_batch(generator: torch.Generator) -> Batch:
    time = torch.arange(HISTORY + HORIZON).unsqueeze(1)
    phase = 6 * torch.rand(1, 8, generator=generator)
    series = torch.sin(time + phase) + 0.2 * torch.randn(len(time), 8, generator=generator)
    return {"history": series[:HISTORY], "future": series[HISTORY:]}


case = Case(model=Forecaster, batch=make_batch, loss=loss, layout="1x2", shards="5+3", batch_dims=1)


class ScaledBackward:
    """Backward passes with a loss scale, and with a limit for every element of a gradient."""

    def __init__(self, model: nn.Module, scale: float = 2.0**14, limit: float = 5.0) -> None:
        self.parameters = list(model.parameters())
        self.scale, self.limit = scale, limit

    def __enter__(self) -> Self:
        self.handles = [p.register_hook(self.cut) for p in self.parameters]
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self.handles:
            handle.remove()

    def cut(self, gradient: Tensor) -> Tensor:
        return gradient.clamp(-self.limit, self.limit)

    def run(self, value: Tensor) -> None:
        (value * self.scale).backward()
        for p in self.parameters:
            p.grad /= self.scale


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    series = torch.tensor(shard["future"].shape[1], device=rank.device)
    of_all_ranks = series.clone()
    dist.all_reduce(of_all_ranks)
    with ScaledBackward(model) as scaled:
        scaled.run(loss(model, shard) * series / of_all_ranks)
    for p in model.parameters():
        dist.all_reduce(p.grad)
