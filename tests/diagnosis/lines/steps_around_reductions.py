"""Steps whose reduction is wrong because of a line beside it, which ends with ``# fault``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

from tests.diagnosis.lines.faulty_line import mean_squares

Batch = dict[str, Tensor]


def average(parameter: Any, world_size: int) -> None:
    dist.all_reduce(parameter.grad)
    parameter.grad /= world_size


def budget_is_used_up(model: Any, batch: Batch, rank: Any) -> None:
    mean_squares(model, batch).backward()
    sent = 0
    for parameter in model.parameters():
        sent += parameter.numel()
        if sent > 80:
            break  # fault
        average(parameter, rank.world_size)


def small_ones_are_skipped(model: Any, batch: Batch, rank: Any) -> None:
    mean_squares(model, batch).backward()
    for parameter in model.parameters():
        count = parameter.numel()
        if count < 6:
            continue  # fault
        average(parameter, rank.world_size)


def context_with_a_name(model: Any, batch: Batch, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    halves = list(zip(*(leaf.chunk(2) for leaf in batch.values()), strict=True))
    for number, (x, y) in enumerate(halves):
        context = ddp.no_sync() if number != 0 else contextlib.nullcontext()  # fault
        with context:
            (mean_squares(ddp, {"x": x, "y": y}) / 2).backward()


def only_the_first_three(model: Any, batch: Batch, rank: Any) -> None:
    mean_squares(model, batch).backward()
    flatten_and_reduce(list(model.parameters())[:3], rank.world_size)  # fault


def flatten_and_reduce(parameters: Iterable[Any], world_size: int) -> None:
    gradients = [one.grad for one in parameters]
    flat = torch.cat([one.flatten() for one in gradients])
    dist.all_reduce(flat)
    flat.div_(world_size)
    for one, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        one.copy_(part.view_as(one))


class Half(Sampler[int]):
    """Every second example, for two ranks, without the rest of a whole number of fours."""

    def __init__(self, count: int, rank: Any) -> None:
        self.count, self.rank = count, rank

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.count)
        order = order[: self.count // 4 * 4]  # fault
        return iter(order[self.rank.rank :: self.rank.world_size].tolist())

    def __len__(self) -> int:
        return self.count // 4 * 2


def order_is_cut(model: Any, batch: Batch, rank: Any) -> None:
    data = TensorDataset(batch["x"], batch["y"])
    loader = DataLoader(data, batch_size=99, sampler=Half(len(data), rank))
    for x, y in loader:
        mean_squares(model, {"x": x, "y": y}).backward()
    for parameter in model.parameters():
        average(parameter, rank.world_size)
