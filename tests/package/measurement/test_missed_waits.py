"""A collective that is issued with async_op=True and never waited for is no pass, and is named."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, Verdict, check
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.measurement.on_rank import Races
from tests.package.own_cases import loss, own_case


def on_one_line(verdict: Verdict) -> str:
    return " ".join(verdict.full_report().split())


def gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def handles_of(model: nn.Module, rank: Rank) -> list[dist.Work]:
    handles = []
    for gradient in gradients(model):
        gradient /= rank.world_size
        handle = dist.all_reduce(gradient, async_op=True)
        assert handle is not None
        handles.append(handle)
    return handles


def waits_for_each(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for handle in handles_of(model, rank):
        handle.wait()


def has_a_barrier(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    handles_of(model, rank)
    dist.barrier()


def takes_the_futures(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    torch.futures.wait_all([handle.get_future() for handle in handles_of(model, rank)])


def asks_until_they_are_complete(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for handle in handles_of(model, rank):
        while not handle.is_completed():
            time.sleep(0.001)


def issues_in_hooks_and_waits_in_the_end(model: nn.Module, shard: Any, rank: Rank) -> None:
    handles = []

    def reduce(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad /= rank.world_size
        handles.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    loss(model, shard).backward()
    for handle in handles:
        assert handle is not None
        handle.wait()


def has_a_hook_of_ddp(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, allreduce_hook)  # it returns the future of a handle
    loss(ddp, shard).backward()


def coalesces(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    coalescing: Any = dist._coalescing_manager  # type: ignore[attr-defined]  # no stubs
    with coalescing(async_ops=True) as manager:
        for gradient in gradients(model):
            gradient /= rank.world_size
            dist.all_reduce(gradient)
    manager.wait()


def uses_functional_collectives(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for gradient in gradients(model):
        group: Any = dist.group.WORLD
        gradient.copy_(functional.all_reduce(gradient, "avg", group))


@pytest.mark.parametrize(
    "step",
    [
        waits_for_each,
        has_a_barrier,
        takes_the_futures,
        asks_until_they_are_complete,
        issues_in_hooks_and_waits_in_the_end,
        has_a_hook_of_ddp,
        coalesces,
        uses_functional_collectives,
    ],
)
def test_a_collective_that_somebody_waits_for_is_the_same(step: Any) -> None:
    verdict = check(own_case(), step)
    assert verdict.outcome == "same", str(verdict)
    assert not any(one.missed_waits for one in verdict.evidence.values())


def reduces_a_copy_and_does_not_wait(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient.clone(), async_op=True)


def is_right_and_reduces_a_copy_as_well(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient)
        gradient /= rank.world_size
    dist.all_reduce(gradients(model)[0].clone(), async_op=True)


def sums_and_reduces_a_copy_as_well(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient)
    dist.all_reduce(gradients(model)[0].clone(), async_op=True)


def test_a_gradient_that_was_right_by_luck_is_no_pass() -> None:
    verdict = check(own_case(), is_right_and_reduces_a_copy_as_well)
    assert verdict.outcome == "unknown", verdict
    assert verdict.unknown_because is UnknownBecause.COLLECTIVE_NOT_WAITED_FOR
    assert "ranks 0, 1 never waited for all_reduce of 35 elements at test_missed" in verdict.reason


def test_a_difference_is_named_after_the_collective_that_came_too_late() -> None:
    verdict = check(own_case(), reduces_a_copy_and_does_not_wait)
    names = ("collective_not_waited_for", "reduced_buffer_not_used")
    assert (verdict.outcome, verdict.causes) == ("different", names), verdict
    assert "all_reduce of 35 elements at test_missed_waits.py:" in on_one_line(verdict)


def test_another_cause_that_explains_the_numbers_is_named_as_well() -> None:
    verdict = check(own_case(), sums_and_reduces_a_copy_as_well)
    assert verdict.causes == ("collective_not_waited_for", "sum_not_mean"), verdict


def test_nobody_waits_at_all() -> None:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        loss(model, shard).backward()
        handles_of(model, rank)

    # Whether the gradients are right depends on which thread is faster.
    verdict = check(own_case(), step)
    assert verdict.outcome in ("different", "unknown"), verdict
    assert "never waited for all_reduce of 35 elements at test_missed_waits.py:" in on_one_line(
        verdict
    )


def test_a_single_number_is_no_exchange_of_gradients() -> None:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        value = loss(ddp, shard)
        value.backward()
        dist.all_reduce(value.detach().clone(), async_op=True)

    assert check(own_case(), step).outcome == "same"


def test_gradients_are_copied_before_the_device_is_synchronised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, right = torch.zeros(3), torch.tensor([1.0, float("nan")])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: late.fill_(1.0))
    races = Races(torch.device("cuda", 0))
    left = races.as_left({"late": late, "right": right, "none": None}, keep=False)
    assert races.changed_later == ["late"]
    assert left["late"] is not None
    assert not left["late"].any()
    assert left["none"] is None
