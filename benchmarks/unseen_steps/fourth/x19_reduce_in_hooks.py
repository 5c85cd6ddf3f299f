"""Gradient accumulation with reductions that start in the backward pass of the last one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

MICRO_BATCH = 2


class OverlappedReducer:
    """Adds up every gradient over the ranks as soon as backward has made it."""

    def __init__(self, model: nn.Module) -> None:
        self.sync_enabled = True
        self.pending: list[dist.Work] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                hook = functools.partial(self.reduce, enabled=self.sync_enabled)
                parameter.register_post_accumulate_grad_hook(hook)

    def reduce(self, parameter: nn.Parameter, enabled: bool) -> None:
        if not enabled:
            return
        self.pending.append(dist.all_reduce(parameter.grad, async_op=True))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        previous, self.sync_enabled = self.sync_enabled, False
        try:
            yield
        finally:
            self.sync_enabled = previous

    def wait(self) -> None:
        while self.pending:
            self.pending.pop().wait()


class ResidualRegressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(6, 10)
        self.hidden = nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 10), nn.SiLU())
        self.outputs = nn.Linear(10, 3)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.inputs(rows)
        return self.outputs(hidden + self.hidden(hidden))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.smooth_l1_loss(model(batch["rows"]), batch["targets"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(18, 6, generator=generator),
        "targets": torch.randn(18, 3, generator=generator),
    }


class AccumulatingTrainer:
    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.model = model
        self.world_size = world_size
        self.reducer = OverlappedReducer(model)

    def split(self, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        rows = batch["rows"].split(MICRO_BATCH)
        targets = batch["targets"].split(MICRO_BATCH)
        return [{"rows": r, "targets": t} for r, t in zip(rows, targets, strict=True)]

    def backward(self, micro_batch: dict[str, Tensor], parts: int) -> float:
        value = loss(self.model, micro_batch) / (parts * self.world_size)
        value.backward()
        return value.item()

    def run(self, batch: dict[str, Tensor]) -> float:
        self.model.zero_grad()
        *first, last = self.split(batch)
        parts = len(first) + 1
        with self.reducer.no_sync():
            total = sum(self.backward(micro_batch, parts) for micro_batch in first)
        total += self.backward(last, parts)
        self.reducer.wait()
        return total


case = Case(model=ResidualRegressor, batch=make_batch, loss=loss, layout="1x3")


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    AccumulatingTrainer(model, rank.world_size).run(shard)
