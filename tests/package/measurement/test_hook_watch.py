"""Hooks are followed while backward runs: what they change, and what they compute in vain."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Rank, check
from ddp_equivalence.measurement.calls import Call, Kind
from tests.package.own_cases import loss, own_case

pytestmark = pytest.mark.self_check

KEPT: list[Tensor] = []


def reduces_and_divides(parameter: Any) -> None:
    dist.all_reduce(parameter.grad)
    parameter.grad /= 8


def divides_a_slice_of_data(parameter: Any) -> None:
    dist.all_reduce(parameter.grad)
    parameter.grad.data.mul_(0.125)


def divide(gradient: Tensor) -> None:
    gradient.div_(8)


def divides_in_a_helper(parameter: Any) -> None:
    dist.all_reduce(parameter.grad)
    divide(parameter.grad)


def waits_and_divides(parameter: Any) -> None:
    handle = dist.all_reduce(parameter.grad, async_op=True)
    assert handle is not None
    handle.wait()
    parameter.grad /= 8


def drops(gradient: Tensor) -> None:
    scaled = gradient / 8  # noqa: F841


def drops_a_tuple(module: nn.Module, given: Any, returned: Any) -> None:
    given = tuple(one * 2 for one in given if one is not None)


def keeps(gradient: Tensor) -> None:
    scaled = gradient / 8
    KEPT.append(scaled)


def returns(gradient: Tensor) -> Tensor:
    return gradient / 8


def takes_a_norm(gradient: Tensor) -> None:
    norm = gradient.norm()  # noqa: F841


def calls_seen(hook: Any, register: str) -> tuple[Call, ...]:
    def step(model: Any, shard: Any, rank: Rank) -> None:
        if register == "register_full_backward_hook":
            model[2].register_full_backward_hook(hook)
        else:
            for parameter in model.parameters():
                getattr(parameter, register)(hook)
        loss(model, shard).backward()
        KEPT.clear()

    verdict = check(own_case(), step)
    assert verdict.outcome == "different", verdict
    assert verdict.view is not None
    return verdict.view.observed.calls.of(0)


def text_of(call: Call) -> str:
    assert call.line is not None
    return linecache.getline(call.line.file, call.line.number).strip()


@pytest.mark.parametrize(
    ("hook", "line"),
    [
        (reduces_and_divides, "parameter.grad /= 8"),
        (divides_a_slice_of_data, "parameter.grad.data.mul_(0.125)"),
        (divides_in_a_helper, "gradient.div_(8)"),
    ],
)
def test_the_line_of_a_hook_that_divides_a_gradient_is_recorded(hook: Any, line: str) -> None:
    calls = calls_seen(hook, "register_post_accumulate_grad_hook")
    changes = [one for one in calls if one.kind is Kind.CHANGE]
    assert {text_of(one) for one in changes} == {line}
    assert {one.change.factor for one in changes if one.change is not None} == {0.125}
    assert {name for one in changes if one.change is not None for name in one.change.names} == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }


def test_nothing_is_said_of_a_gradient_that_a_collective_may_change_at_any_time() -> None:
    calls = calls_seen(waits_and_divides, "register_post_accumulate_grad_hook")
    assert not [one for one in calls if one.kind is Kind.CHANGE]


@pytest.mark.parametrize(
    ("hook", "register", "name"),
    [
        (drops, "register_hook", "scaled"),
        (drops_a_tuple, "register_full_backward_hook", "given"),
    ],
)
def test_what_a_hook_computes_and_does_not_give_back_is_recorded(
    hook: Any, register: str, name: str
) -> None:
    dropped = [one for one in calls_seen(hook, register) if one.kind is Kind.DROPPED]
    assert {one.what for one in dropped} == {name}
    assert {one.names for one in dropped} == {(register,)}


@pytest.mark.parametrize("hook", [keeps, returns, takes_a_norm])
def test_what_a_hook_keeps_or_returns_is_not_recorded_as_dropped(hook: Any) -> None:
    calls = calls_seen(hook, "register_hook")
    assert not [one for one in calls if one.kind is Kind.DROPPED]
