"""Steps whose ranks wait for each other, each with the step that the report advises."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from tests.package.own_cases import loss

Shard = dict[str, Tensor]


def logs(on: tuple[int, ...], before_backward: bool = False) -> Any:
    """Reduces the loss for a log, ``on`` some ranks."""

    def step(model: nn.Module, shard: Shard, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        of_shard = loss(ddp, shard)
        seen = of_shard.detach().clone()
        if before_backward and rank.rank in on:
            dist.all_reduce(seen)
        of_shard.backward()
        if not before_backward and rank.rank in on:
            dist.all_reduce(seen)

    return step


def saves(on: tuple[int, ...]) -> Any:
    def step(model: nn.Module, shard: Shard, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        loss(ddp, shard).backward()
        if rank.rank in on:
            dist.barrier()

    return step


def trains(batches: tuple[int, ...]) -> Any:
    """Each rank makes so many batches of its shard."""

    def step(model: nn.Module, shard: Shard, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        count = batches[rank.rank]
        parts = (shard[name].chunk(count) for name in ("rows", "targets"))
        for rows, targets in zip(*parts, strict=True):
            (F.mse_loss(ddp(rows), targets) / count).backward()

    return step


def skips(on: int | None) -> Any:
    """Leaves out its second batch ``on`` a rank."""

    def step(model: nn.Module, shard: Shard, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        parts = (shard[name].chunk(2) for name in ("rows", "targets"))
        for number, (rows, targets) in enumerate(zip(*parts, strict=True)):
            if number == 1 and rank.rank == on:
                continue
            (F.mse_loss(ddp(rows), targets) / 2).backward()

    return step


def in_another_order(on: int | None) -> Any:
    def step(model: nn.Module, shard: Shard, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        if rank.rank == on:
            dist.barrier()
        dist.broadcast(torch.zeros(1), 0)
        if rank.rank != on:
            dist.barrier()
        loss(ddp, shard).backward()

    return step


def receives(on: tuple[int, ...]) -> Any:
    def step(model: nn.Module, shard: Shard, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        if rank.rank in on:
            dist.recv(torch.zeros(1), 1 - rank.rank)
        else:
            dist.send(torch.zeros(1), 1 - rank.rank)
        loss(ddp, shard).backward()

    return step


def raises_in_front_of(what: str) -> Any:
    def step(model: nn.Module, shard: Shard, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        of_shard = loss(ddp, shard)
        if rank.rank == 1:
            raise OSError("disk is full")
        if what == "barrier":
            dist.barrier()
        if what == "recv":
            dist.recv(torch.zeros(1), 1)
        of_shard.backward()

    return step


def sleeps(model: nn.Module, shard: Shard, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    if rank.rank == 1:
        time.sleep(1000)
    loss(ddp, shard).backward()
