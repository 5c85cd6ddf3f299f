"""A communication hook of DDP is at fault: the report points at its collective, or at its line."""

# DDP compares the annotations of a hook with classes. So this file must not import annotations from
# __future__, which turns them into strings.

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from tests.package.pointed_at import (
    Rows,
    assert_points_at_the_fault,
    judged,
    mean_loss,
    when_done,
)

pytestmark = pytest.mark.self_check

Future = torch.futures.Future[torch.Tensor]


class SumsInAHook:
    """A trainer whose communication hook adds up and does not divide."""

    def __init__(self, model: Any) -> None:
        self.ddp = DistributedDataParallel(model)
        self.ddp.register_comm_hook(None, self.hook)

    @staticmethod
    def hook(state: object, bucket: GradBucket) -> Future:
        values = bucket.buffer()
        work: Any = dist.all_reduce(values, async_op=True)  # the fault
        return when_done(work, lambda future: future.value()[0])

    def step(self, rows: Rows) -> None:
        mean_loss(self.ddp, rows).backward()


def summed_in_a_hook(model: Any, rows: Rows, rank: Rank) -> None:
    SumsInAHook(model).step(rows)


def averaged_twice_in_a_hook(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    ddp.register_comm_hook(rank.world_size, divide_again)
    outputs = ddp(rows["x"])
    nn.functional.mse_loss(outputs, rows["y"]).backward()


def divide_again(world_size: int, bucket: GradBucket) -> Future:
    values = bucket.buffer().div_(world_size)
    work: Any = dist.all_reduce(values, async_op=True)  # the fault
    return when_done(work, lambda future: future.value()[0] / world_size)


def keep(state: object, bucket: GradBucket) -> Future:
    done: Future = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def a_hook_that_keeps(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, keep)  # the fault
    mean_loss(ddp, rows).backward()


def in_half(state: object, bucket: GradBucket) -> Future:
    half = bucket.buffer().to(torch.bfloat16)
    half.div_(dist.get_world_size())
    work: Any = dist.all_reduce(half, async_op=True)  # the fault
    return when_done(work, lambda future: future.value()[0].to(bucket.buffer().dtype))


@pytest.mark.parametrize(
    ("step", "changes", "cause", "fix"),
    [
        (summed_in_a_hook, {}, "sum_not_mean", "by 4, the number of ranks, in the hook"),
        (
            averaged_twice_in_a_hook,
            {},
            "averaged_twice",
            "once in the hook",
        ),
        (a_hook_that_keeps, {}, "no_all_reduce", "let the hook all_reduce its bucket"),
    ],
)
def test_the_line_of_the_hook_is_pointed_at(
    step: Any, changes: dict[str, Any], cause: str, fix: str
) -> None:
    assert_points_at_the_fault(judged(step, **changes), cause, fix)
