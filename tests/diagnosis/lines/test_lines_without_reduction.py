"""Nothing is reduced: the report points at what prevents it, or after which it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddp_equivalence import Rank
from tests.package.pointed_at import (
    Rows,
    assert_points_at_the_fault,
    halves,
    judged,
    mean_loss,
)

pytestmark = pytest.mark.self_check


def nothing_reduces(model: Any, rows: Rows, rank: Rank) -> None:
    loss = mean_loss(model, rows)
    logged = loss.detach().clone()
    dist.all_reduce(logged)
    loss.backward()  # the fault
    clip_grad_norm_(model.parameters(), 1e9)


class Trainer:
    """A trainer that wraps its model, and forgets to use the wrapper."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.wrapper = DistributedDataParallel(model)

    def outputs(self, rows: Rows) -> Any:
        return self.model(rows["x"])  # the fault

    def train(self, rows: Rows) -> None:
        loss = nn.functional.mse_loss(self.outputs(rows), rows["y"])
        loss.backward()
        clip_grad_norm_(self.wrapper.parameters(), 1e9)


def module_in_a_class(model: Any, rows: Rows, rank: Rank) -> None:
    Trainer(model).train(rows)


def module_given_to_the_loss(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    with torch.no_grad():
        ddp(rows["x"])
    loss = mean_loss(ddp.module, rows)  # the fault
    loss.backward()


def all_under_no_sync(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    parts = halves(rows)
    with ddp.no_sync():  # the fault
        for part in parts:
            loss = mean_loss(ddp, part) / len(parts)
            loss.backward()


def flag_left_off(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    prepare(ddp, rank)
    mean_loss(ddp, rows).backward()


def prepare(ddp: DistributedDataParallel, rank: Rank) -> None:
    ddp.train()
    ddp.require_backward_grad_sync = rank.world_size == 1  # the fault


@contextmanager
def without_sync(ddp: DistributedDataParallel, last: bool) -> Iterator[None]:
    with ddp.no_sync() if not last else nullcontext():  # the fault
        yield


def flag_read_in_forward(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    with without_sync(ddp, last=False):
        loss = mean_loss(ddp, rows)
    loss.backward()


def wrapper_without_a_name(model: Any, rows: Rows, rank: Rank) -> None:
    dist.barrier()
    outputs = DistributedDataParallel(model)(rows["x"])  # the fault
    nn.functional.mse_loss(outputs, rows["y"]).backward()


def through_a_wrapper(model: Any, inputs: Tensor) -> Any:
    ddp = DistributedDataParallel(model)  # the fault
    return ddp(inputs)


def wrapper_of_a_helper(model: Any, rows: Rows, rank: Rank) -> None:
    kept = DistributedDataParallel(model)
    loss = nn.functional.mse_loss(through_a_wrapper(kept.module, rows["x"]), rows["y"])
    loss.backward()


@pytest.mark.parametrize(
    ("step", "changes", "cause", "fix"),
    [
        (nothing_reduces, {}, "no_all_reduce", "all_reduce each gradient over 4 ranks"),
        (module_in_a_class, {}, "raw_module_called", "call the DistributedDataParallel"),
        (module_given_to_the_loss, {}, "raw_module_called", "not the module that it wraps"),
        (all_under_no_sync, {}, "no_sync_left_on", "the last of the 2 forward passes"),
        (flag_left_off, {}, "no_sync_left_on", "outside no_sync"),
        (flag_read_in_forward, {}, "no_sync_left_on", "outside no_sync"),
        (wrapper_without_a_name, {}, "wrapper_dropped", "in a variable"),
        (wrapper_of_a_helper, {}, "wrapper_dropped", "in a variable"),
    ],
)
def test_the_line_that_prevents_the_reduction_is_pointed_at(
    step: Any, changes: dict[str, Any], cause: str, fix: str
) -> None:
    assert_points_at_the_fault(judged(step, **changes), cause, fix)
