"""Steps that raise: on one rank or on all, in forward, backward, the loss, a worker of a loader, or
where they ask the CPU for what only GPUs have.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp_equivalence import Rank
from tests.package.own_cases import loss

Shard = dict[str, Tensor]

# Anywhere in a step.


def a_key_on_one_rank(model: nn.Module, shard: Shard, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    if rank.rank == 1:
        shard["mask"]
    loss(ddp, shard).backward()


def many_lines(model: nn.Module, shard: Shard, rank: Rank) -> None:
    raise ValueError("bad rows:\n" + "\n".join(f"row {row}: no label" for row in range(300)))


def other_state(model: nn.Module, shard: Shard, rank: Rank) -> None:
    model.load_state_dict({"head.weight": torch.zeros(3, 5)})


def from_another(model: nn.Module, shard: Shard, rank: Rank) -> None:
    try:
        json.loads("{")
    except ValueError as error:
        raise RuntimeError("cannot read config.json") from error


def without_text(model: nn.Module, shard: Shard, rank: Rank) -> None:
    assert len(shard["rows"]) == 99


def in_numpy(model: nn.Module, shard: Shard, rank: Rank) -> None:
    np.linalg.inv(np.zeros((2, 2)))


def exits(model: nn.Module, shard: Shard, rank: Rank) -> None:
    if rank.rank == 1:
        raise SystemExit("no checkpoint found")
    loss(DistributedDataParallel(model), shard).backward()


# In forward.


class Wrong(nn.Module):
    """``how`` its forward pass fails."""

    def __init__(self, model: nn.Module, how: str) -> None:
        super().__init__()
        self.model, self.how = model, how
        self.words = nn.Embedding(4, 5, dtype=torch.float64)

    def forward(self, rows: Tensor) -> Any:
        if self.how == "shape":
            return self.model(rows.T)
        if self.how == "index":
            return self.words(torch.tensor([7]))
        if self.how == "name":
            return self.model(rows + self.scale)  # type: ignore[operator]
        if self.how == "dtype":
            return self.model(rows.float())
        return self.model(rows, mask=None)


def forward(how: str, only_on: int | None = None) -> Any:
    def step(model: nn.Module, shard: Shard, rank: Rank) -> None:
        wrong = only_on is None or rank.rank == only_on
        ddp = DistributedDataParallel(Wrong(model, how) if wrong else model)
        F.mse_loss(ddp(shard["rows"]), shard["targets"]).backward()

    return step


# In backward.


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ArithmeticError("no gradient of a sort")


class WrongCount(Fails):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], gradients[0]


class WrongShape(Fails):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].sum(0)[:1]


def own_backward(function: Any) -> Any:
    def step(model: nn.Module, shard: Shard, rank: Rank) -> None:
        out = function.apply(DistributedDataParallel(model)(shard["rows"]))
        F.mse_loss(out, shard["targets"]).backward()

    return step


def in_a_hook(model: nn.Module, shard: Shard, rank: Rank) -> None:
    def check_finite(gradient: Tensor) -> None:
        raise FloatingPointError("gradient is not finite")

    ddp = DistributedDataParallel(model)
    if rank.rank == 1:
        next(model.parameters()).register_hook(check_finite)
    loss(ddp, shard).backward()


def backward_again(model: nn.Module, shard: Shard, rank: Rank) -> None:
    of_shard = loss(DistributedDataParallel(model), shard)
    of_shard.backward()
    of_shard.backward()


def backward_of_many(model: nn.Module, shard: Shard, rank: Rank) -> None:
    out = DistributedDataParallel(model)(shard["rows"])
    F.mse_loss(out, shard["targets"], reduction="none").backward()


# In the loss.


def wrong_loss(how: str) -> Any:
    def step(model: nn.Module, shard: Shard, rank: Rank) -> None:
        out = DistributedDataParallel(model)(shard["rows"])
        if how == "class":
            F.cross_entropy(out, torch.full((len(out),), 9)).backward()
        if how == "shape":
            (out - shard["targets"][:, :2]).square().mean().backward()
        if how == "dtype":
            F.cross_entropy(out, shard["targets"].argmax(1).int().float()).backward()
        if how == "none":
            F.mse_loss(out, None).backward()  # type: ignore[arg-type]
        if how == "one rank" and rank.rank == 1:
            raise FloatingPointError(f"loss is {F.mse_loss(out, shard['targets'] * 0).item() * 0}")
        value = F.mse_loss(out, shard["targets"])
        (value.detach() if how == "detached" else value).backward()

    return step


# In a worker of a loader.


class Rows(Dataset[Tensor]):
    def __init__(self, rows: Tensor, how: str) -> None:
        self.rows, self.how = rows, how

    def __getitem__(self, index: int) -> Any:
        if self.how == "item":
            raise KeyError(f"no label of row {index}")
        if self.how == "killed":
            os.kill(os.getpid(), 9)
        if self.how == "late":
            time.sleep(100)
        if self.how == "sizes":
            return self.rows[index, : index + 1]
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(5, dtype=torch.float64)
        raise OSError("the stream has ended early")


def joined(rows: list[Tensor]) -> Tensor:
    raise TypeError("rows of different kinds")


def loads(how: str, **options: Any) -> Any:
    def step(model: nn.Module, shard: Shard, rank: Rank) -> None:
        data: Any = Stream() if how == "stream" else Rows(shard["rows"], how)
        collate = joined if how == "collate" else None
        ddp = DistributedDataParallel(model)
        for rows in DataLoader(data, 2, num_workers=1, collate_fn=collate, **options):
            ddp(rows).sum().backward()

    return step


# What only GPUs have.


def only_on_gpus(how: str) -> Any:
    def step(model: nn.Module, shard: Shard, rank: Rank) -> None:
        if how == "model":
            model.cuda()
        if how == "device":
            torch.cuda.set_device(rank.local_rank)
        if how == "tensor":
            torch.zeros(3, device="cuda")
        if how == "to":
            shard["rows"].to(f"cuda:{rank.local_rank}")
        if how == "synchronize":
            torch.cuda.synchronize()
        if how == "group":
            dist.all_reduce(torch.zeros(1), group=dist.new_group(backend="nccl"))

    return step
