"""The second run of a step records the calls that matter, with the lines that made them."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddp_equivalence import Rank, check
from ddp_equivalence.measurement.calls import Call, Kind
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


def clipped_and_cleared(model: nn.Module, shard: Any, rank: Rank) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model, shard).backward()
    optimizer.zero_grad()
    loss(model, shard).backward()
    clip_grad_norm_(model.parameters(), 0.001)
    next(model.parameters()).grad = None


def wrapped(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (2 * loss(ddp, shard)).backward()


def compiled(model: nn.Module, shard: Any, rank: Rank) -> None:
    faster: Any = torch.compile(model, backend="eager")
    loss(faster, shard).backward()


LOSS = 'return F.mse_loss(model(batch["rows"]), batch["targets"])'
BACKWARD = (Kind.BACKWARD, "loss(model, shard).backward()")
CALLS = {
    by_hand: [
        (Kind.FORWARD, LOSS),
        BACKWARD,
        (Kind.COLLECTIVE, "dist.all_reduce(gradient)"),
        (Kind.CHANGE, "gradient /= 8"),
    ],
    clipped_and_cleared: [
        (Kind.FORWARD, LOSS),
        BACKWARD,
        (Kind.ZERO_GRAD, "optimizer.zero_grad()"),
        (Kind.CHANGE, "optimizer.zero_grad()"),
        (Kind.CLIP, "clip_grad_norm_(model.parameters(), 0.001)"),
        (Kind.CHANGE, "clip_grad_norm_(model.parameters(), 0.001)"),
        (Kind.CHANGE, "next(model.parameters()).grad = None"),
    ],
    wrapped: [
        (Kind.WRAP, "ddp = DistributedDataParallel(model)"),
        (Kind.FORWARD, LOSS),
        (Kind.BACKWARD, "(2 * loss(ddp, shard)).backward()"),
    ],
    compiled: [(Kind.BACKWARD, "loss(faster, shard).backward()")],
}
"""Step -> its calls in their order, each of them once. A wrapper's collectives are its own."""

OF_GRADIENTS = {
    *(Kind.WRAP, Kind.FORWARD, Kind.BACKWARD, Kind.COLLECTIVE, Kind.CHANGE, Kind.CLIP),
    Kind.ZERO_GRAD,
}


def text(call: Call) -> str:
    assert call.line is not None
    return linecache.getline(call.line.file, call.line.number).strip()


@pytest.mark.parametrize("step", CALLS, ids=lambda step: step.__name__)
def test_calls_come_in_their_order_with_the_lines_that_made_them(step: Any) -> None:
    verdict = check(own_case(), step)
    assert verdict.outcome == "different", str(verdict)
    assert len(verdict.observed) == 2, verdict.why_not_watched
    kinds = {kind for kind, _ in CALLS[step]} | (OF_GRADIENTS if step is not compiled else set())
    calls = [call for call in verdict.observed[0].calls if call.kind in kinds]
    assert list(dict.fromkeys((call.kind, text(call)) for call in calls)) == CALLS[step]
    changes = [call.change for call in calls if call.change is not None]
    assert {name for one in changes for name in one.names} <= set(ALL)
    assert step is not by_hand or {one.factor for one in changes} == {0.125}


def weighed_by_a_gradient(model: Any, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    value = loss(ddp, shard)
    weight = next(model.parameters())
    penalty = torch.autograd.grad(value, weight, retain_graph=True)[0].square().mean()
    torch.autograd.backward(tensors=rank.world_size * value + 0 * penalty)


def gradients_by_hand(model: Any, shard: Any, rank: Rank) -> None:
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss(model, shard), parameters)
    for one, gradient in zip(parameters, found, strict=True):
        dist.all_reduce(gradient)
        one.grad = gradient


@pytest.mark.parametrize("step", [weighed_by_a_gradient, gradients_by_hand])
def test_only_the_gradients_of_all_parameters_are_a_backward_pass(step: Any) -> None:
    verdict = check(own_case(), step)
    assert verdict.cause == "sum_not_mean"
    assert {len(seen.backwards) for seen in verdict.observed.values()} == {1}
