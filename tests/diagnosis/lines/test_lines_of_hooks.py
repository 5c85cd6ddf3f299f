"""A communication hook of DDP is at fault: the report points at its collective, or at its line."""

# DDP compares the annotations of a hook with classes. So this file must not import annotations from
# __future__, which turns them into strings.

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
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


def divided_in_a_hook(model: Any, rows: Rows, rank: Rank) -> None:
    local = rank.local_world_size

    def hook(state: object, bucket: GradBucket) -> Future:
        values = bucket.buffer().div_(local)
        work: Any = dist.all_reduce(values, async_op=True)  # the fault
        return when_done(work, lambda future: future.value()[0])

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    mean_loss(ddp, rows).backward()


def keep(state: object, bucket: GradBucket) -> Future:
    done: Future = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def a_hook_that_keeps(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, keep)  # the fault
    mean_loss(ddp, rows).backward()


def compressed(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, fp16_compress_hook)  # the fault
    outputs = ddp(rows["x"])
    nn.functional.mse_loss(outputs, rows["y"]).backward()


def in_half(state: object, bucket: GradBucket) -> Future:
    half = bucket.buffer().to(torch.bfloat16)
    half.div_(dist.get_world_size())
    work: Any = dist.all_reduce(half, async_op=True)  # the fault
    return when_done(work, lambda future: future.value()[0].to(bucket.buffer().dtype))


def compressed_by_hand(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, in_half)
    mean_loss(ddp, rows).backward()


def scale_by_rank(rank: int, bucket: GradBucket) -> Future:
    scale = 2.0**rank
    work: Any = dist.all_reduce(bucket.buffer().mul_(scale / 4), async_op=True)  # the fault
    return when_done(work, lambda future: future.value()[0] / scale)


def scales_differ_in_a_hook(model: Any, rows: Rows, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(rank.rank, scale_by_rank)
    mean_loss(ddp, rows).backward()


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
        (divided_in_a_hook, {}, "divided_by_local_world_size", "divide by 4"),
        (a_hook_that_keeps, {}, "no_all_reduce", "let the hook all_reduce its bucket"),
        (compressed, {}, "low_precision_reduce", "reduce the gradients in float64"),
        (compressed_by_hand, {}, "low_precision_reduce", "reduce the gradients in float64"),
        (scales_differ_in_a_hook, {}, "scaler_differs_between_ranks", "all 4 ranks one scale"),
    ],
)
def test_the_line_of_the_hook_is_pointed_at(
    step: Any, changes: dict[str, Any], cause: str, fix: str
) -> None:
    assert_points_at_the_fault(judged(step, **changes), cause, fix)
