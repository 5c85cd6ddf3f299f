"""Copies of gradients that are reduced, and whose result nobody uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Rank, check
from tests.diagnosis.causes.named import (
    accepted,
    case_of,
    different,
    faulty_lines,
    first_finding,
    loss,
)

Shard = dict[str, Tensor]


def flat_buffer(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss(model, shard).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)  # a flat copy
    flat /= rank.world_size


def asynchronous_temporaries(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss(model, shard).backward()
    handles = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        mean = parameter.grad / rank.world_size
        handles.append(dist.all_reduce(mean, async_op=True))  # a temporary
    for handle in handles:
        handle.wait()


def divided_all_the_same(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad.clone())  # a clone
        parameter.grad /= rank.world_size


def first_layer_not_put_back(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss(model, shard).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        mean = parameter.grad / rank.world_size
        dist.all_reduce(mean)
        if not name.startswith("0."):
            parameter.grad.copy_(mean)


def put_back(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss(model, shard).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= rank.world_size
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


def put_back_in_another_order(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss(model, shard).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]) / rank.world_size
    dist.all_reduce(flat)
    at = 0
    for gradient in reversed(gradients):
        gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
        at += gradient.numel()


def parameters_reduced(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= rank.world_size


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (flat_buffer, "dist.all_reduce(flat)  # a flat copy"),
        (
            asynchronous_temporaries,
            "handles.append(dist.all_reduce(mean, async_op=True))  # a temporary",
        ),
        (divided_all_the_same, "dist.all_reduce(parameter.grad.clone())  # a clone"),
    ],
)
def test_a_reduced_copy_that_is_not_put_back_is_named(step: Any, line: str) -> None:
    verdict = different(case_of(), step)
    finding = first_finding(verdict)
    assert finding.cause == "reduced_buffer_not_used", verdict
    assert faulty_lines(verdict) == [line], verdict
    assert finding.fix == (
        f"after line {finding.lines[0].line.number} copy the reduced tensor back into each .grad, "
        "divided by 4 once."
    )
    assert "copies of 4 of 4 gradients" in finding.because


def test_copies_that_are_put_back_for_some_parameters_only_are_named() -> None:
    verdict = different(case_of(), first_layer_not_put_back)
    finding = first_finding(verdict)
    assert finding.cause == "reduced_buffer_not_used", verdict
    assert "copies of 2 of 4 gradients" in finding.because


def test_a_copy_that_is_put_back_is_right() -> None:
    verdict = check(case_of(), put_back)
    assert verdict.outcome == "same", verdict


def test_a_copy_that_is_put_back_wrongly_is_not_called_unused() -> None:
    verdict = different(case_of(), put_back_in_another_order)
    assert "reduced_buffer_not_used" not in accepted(verdict), verdict


def test_reduced_parameters_are_no_copies_of_gradients() -> None:
    verdict = different(case_of(), parameters_reduced)
    assert verdict.cause == "parameters_reduced_not_gradients", verdict
    assert "reduced_buffer_not_used" not in accepted(verdict)
