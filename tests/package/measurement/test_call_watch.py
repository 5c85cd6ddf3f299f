"""The second run of a step records the calls that matter, with the lines that made them."""

from __future__ import annotations

import inspect
import linecache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddp_equivalence import Rank, check
from ddp_equivalence.measurement.calls import Call, Contents, Kind
from tests.package.own_cases import loss, own_case

ALL = ("0.weight", "0.bias", "2.weight", "2.bias")


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def by_hand(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient)
    for gradient in gradients(model):
        gradient /= 8


def through_data(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient.data)
        gradient.data.mul_(0.125)


def flat_and_forgotten(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients(model)])
    flat /= 2
    dist.all_reduce(flat)


def parameters_instead(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.data, op=dist.ReduceOp.AVG)


def asynchronous(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    handles = [dist.all_reduce(gradient, async_op=True) for gradient in gradients(model)]
    for handle in handles:
        assert handle is not None
        handle.wait()
    for gradient in gradients(model):
        gradient.div_(8)


def with_a_hook(model: nn.Module, shard: Any, rank: Rank) -> None:
    bias = dict(model.named_parameters())["2.bias"]
    bias.register_hook(lambda gradient: gradient * 0.5)
    loss(model, shard).backward()


def clipped_and_cleared(model: nn.Module, shard: Any, rank: Rank) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model, shard).backward()
    optimizer.zero_grad()
    loss(model, shard).backward()
    clip_grad_norm_(model.parameters(), 0.001)
    next(model.parameters()).grad = None


def in_a_group(model: nn.Module, shard: Any, rank: Rank) -> None:
    group = dist.new_group([0, 1])
    loss(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient, group=group)


def wrapped(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (2 * loss(ddp, shard)).backward()


def compiled(model: nn.Module, shard: Any, rank: Rank) -> None:
    faster: Any = torch.compile(model, backend="eager")
    loss(faster, shard).backward()


OF_GRADIENTS = frozenset(
    (
        *(Kind.WRAP, Kind.FORWARD, Kind.BACKWARD, Kind.COLLECTIVE, Kind.CHANGE, Kind.CLIP),
        *(Kind.ZERO_GRAD, Kind.NEW_GROUP),
    )
)


def calls_of(step: Any) -> tuple[Call, ...]:
    verdict = check(own_case(), step)
    assert verdict.outcome == "different", str(verdict)
    assert len(verdict.observed) == 2, verdict.why_not_watched
    return tuple(call for call in verdict.observed[0].calls if call.kind in OF_GRADIENTS)


def text(call: Call) -> str:
    assert call.line is not None
    return linecache.getline(call.line.file, call.line.number).strip()


def summary(call: Call) -> tuple[object, ...]:
    return call.kind, text(call)


def test_calls_come_in_their_order_with_the_lines_that_made_them() -> None:
    seen = list(dict.fromkeys(map(summary, calls_of(by_hand))))
    assert seen == [
        (Kind.FORWARD, 'return F.mse_loss(model(batch["rows"]), batch["targets"])'),
        (Kind.BACKWARD, "loss(model, shard).backward()"),
        (Kind.COLLECTIVE, "dist.all_reduce(gradient)"),
        (Kind.CHANGE, "gradient /= 8"),
    ]


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (by_hand, "gradient /= 8"),
        (through_data, "gradient.data.mul_(0.125)"),
        (asynchronous, "gradient.div_(8)"),
    ],
)
def test_a_line_that_multiplies_gradients_is_known_with_its_factor(step: Any, line: str) -> None:
    changes = [call for call in calls_of(step) if call.change is not None]
    assert {text(call) for call in changes} == {line}
    assert {call.change.factor for call in changes if call.change is not None} == {0.125}
    names = [name for call in changes if call.change is not None for name in call.change.names]
    assert sorted(names) == sorted(ALL)


@pytest.mark.parametrize(
    ("step", "contents", "factor", "names"),
    [
        (by_hand, Contents.GRADIENTS, 1.0, ALL[:1]),
        (through_data, Contents.GRADIENTS, 1.0, ALL[:1]),
        (flat_and_forgotten, Contents.COPIES_OF_GRADIENTS, 0.5, ALL),
        (parameters_instead, Contents.PARAMETERS, 1.0, ALL[:1]),
    ],
)
def test_it_is_known_what_a_collective_reduces(
    step: Any, contents: Contents, factor: float, names: tuple[str, ...]
) -> None:
    collective = next(call.collective for call in calls_of(step) if call.collective is not None)
    assert (collective.op, collective.ranks) == ("all_reduce", (0, 1))
    assert (collective.contents, collective.names) == (contents, names)
    assert collective.factor == pytest.approx(factor)


def test_the_operation_and_whether_it_is_waited_for_are_known() -> None:
    averaged = next(call.collective for call in calls_of(parameters_instead) if call.collective)
    assert (averaged.reduce_op, averaged.asynchronous) == ("AVG", False)
    later = next(call.collective for call in calls_of(asynchronous) if call.collective)
    assert (later.reduce_op, later.asynchronous) == ("SUM", True)


def test_what_a_hook_does_to_a_gradient_is_seen() -> None:
    (call,) = [call for call in calls_of(with_a_hook) if call.change is not None]
    assert call.change is not None
    assert (call.change.names, call.change.factor) == (("2.bias",), 0.5)
    assert call.in_backward
    assert text(call) == "loss(model, shard).backward()"


def test_clips_and_cleared_gradients_are_seen() -> None:
    calls = calls_of(clipped_and_cleared)
    kinds = [call.kind for call in calls if call.kind is not Kind.FORWARD]
    cleared = [Kind.ZERO_GRAD, Kind.CHANGE]
    assert kinds == [Kind.BACKWARD, *cleared, Kind.BACKWARD, Kind.CLIP, Kind.CHANGE, Kind.CHANGE]
    clip = next(call for call in calls if call.kind is Kind.CLIP)
    assert (clip.what, clip.value) == ("clip_grad_norm_", 0.001)
    zero = next(call for call in calls if call.kind is Kind.ZERO_GRAD)
    assert zero.names == ALL
    last = calls[-1]
    assert last.change is not None
    assert (last.change.names, last.change.cleared) == (ALL[:1], True)
    assert text(last) == "next(model.parameters()).grad = None"


def test_groups_are_known_although_the_ranks_are_new() -> None:
    calls = calls_of(in_a_group)
    assert [call.ranks for call in calls if call.kind is Kind.NEW_GROUP] == [(0, 1)]


def test_a_wrapper_is_seen_and_what_it_reduces_is_no_change() -> None:
    calls = calls_of(wrapped)
    kinds = [(call.kind, call.what) for call in calls]
    assert kinds == [
        (Kind.WRAP, "DistributedDataParallel"),
        (Kind.FORWARD, "DistributedDataParallel"),
        (Kind.FORWARD, "Sequential"),
        (Kind.BACKWARD, ""),
    ]


def test_a_compiled_model_is_watched_too() -> None:
    calls = calls_of(compiled)
    assert [text(call) for call in calls if call.kind is Kind.BACKWARD] == [
        "loss(faster, shard).backward()"
    ]


def test_the_line_of_a_helper_is_the_innermost_one() -> None:
    call = next(call for call in calls_of(by_hand) if call.kind is Kind.FORWARD)
    assert call.line is not None
    assert call.line.function == "loss"
    assert call.line.file == inspect.getsourcefile(loss)
