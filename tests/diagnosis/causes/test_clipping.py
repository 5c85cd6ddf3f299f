"""Gradients that are clipped in parts: each parameter, or each micro-batch, by itself."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddp_equivalence import Rank
from ddp_equivalence.diagnosis import shares
from ddp_equivalence.diagnosis.causes import HYPOTHESES
from tests.diagnosis.causes.named import (
    accepted,
    case_of,
    different,
    faulty_lines,
    first_finding,
    loss,
)

Shard = dict[str, Tensor]

MAX_NORM = 0.1


def each_parameter(model: nn.Module, shard: Shard, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    for parameter in model.parameters():
        clip_grad_norm_(parameter, MAX_NORM)


def scaled(begins: str = "", ends: str = "", max_norm: float = 1.0) -> Any:
    """A step with a loss scale. ``begins``, ``ends``: what stands before and after the clipping."""

    def step(model: nn.Module, shard: Shard, rank: Rank) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        ddp = DistributedDataParallel(model)
        scaler.scale(loss(ddp, shard)).backward()
        if begins == "unscales":
            scaler.unscale_(optimizer)
        elif begins == "divides":
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= scaler.get_scale()
        clip_grad_norm_(model.parameters(), max_norm)
        if ends == "unscales":
            scaler.unscale_(optimizer)
        elif ends == "steps":
            scaler.step(optimizer)

    return step


def each_layer_before_reducing(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss(model, shard).backward()
    for layer in model.children():
        clip_grad_norm_(list(layer.parameters()), MAX_NORM)  # of a layer
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


def each_by_hand(model: nn.Module, shard: Shard, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= min(1.0, MAX_NORM / float(parameter.grad.norm()))


def each_micro_batch(model: nn.Module, shard: Shard, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    for number in range(3):
        micro_batch = {name: leaf[number::3] for name, leaf in shard.items()}
        with nullcontext() if number == 2 else ddp.no_sync():
            (loss(ddp, micro_batch) / 3).backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)  # in the loop


def before_reducing(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss(model, shard).backward()
    clip_grad_norm_(model.parameters(), MAX_NORM)
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


def norms_that_nothing_exceeds(model: nn.Module, shard: Shard, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        clip_grad_norm_(parameter, 1e6)
        dist.all_reduce(parameter.grad)


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (each_parameter, "clip_grad_norm_(parameter, MAX_NORM)"),
        (
            each_layer_before_reducing,
            "clip_grad_norm_(list(layer.parameters()), MAX_NORM)  # of a layer",
        ),
        (each_by_hand, "parameter.grad *= min(1.0, MAX_NORM / float(parameter.grad.norm()))"),
    ],
)
def test_parameters_that_are_clipped_one_by_one_are_named(step: Any, line: str) -> None:
    verdict = different(case_of(), step)
    finding = first_finding(verdict)
    assert finding.cause == "clipped_per_parameter", verdict
    assert faulty_lines(verdict) == [line], verdict
    assert finding.fix.startswith("call clip_grad_norm_(model.parameters(), max_norm) once")


def test_a_clipping_in_the_loop_over_micro_batches_is_named() -> None:
    verdict = different(case_of(), each_micro_batch)
    finding = first_finding(verdict)
    assert finding.cause == "clipped_per_micro_batch", verdict
    assert faulty_lines(verdict) == [
        "clip_grad_norm_(model.parameters(), MAX_NORM)  # in the loop"
    ], verdict
    assert "called 3 times" in finding.because
    assert finding.fix.startswith("clip once")


@pytest.mark.parametrize(
    ("ends", "detail"),
    [
        ("unscales", "clipping to 1 limited the real norm to 1.5e-05"),
        ("steps", "clipping to 1 limited the real norm to 1.5e-05"),
    ],
)
def test_a_clipping_of_scaled_gradients_is_named(ends: str, detail: str) -> None:
    verdict = different(case_of(), scaled(ends=ends))
    finding = first_finding(verdict)
    assert finding.cause == "clipped_while_scaled", verdict
    assert finding.detail.endswith(detail), verdict
    assert faulty_lines(verdict) == ["clip_grad_norm_(model.parameters(), max_norm)"], verdict
    assert finding.fix == "call scaler.unscale_(optimizer) before clip_grad_norm_."


@pytest.mark.parametrize("max_norm", [1.0, 1e9])
def test_gradients_that_nothing_unscales_are_named_whether_or_not_they_are_clipped(
    max_norm: float,
) -> None:
    step = scaled(ends="", max_norm=max_norm)
    assert accepted(different(case_of(), step)) == {"gradient_scaled_not_unscaled"}


@pytest.mark.parametrize(
    ("step", "names"),
    [
        (before_reducing, {"clipped_before_reduce"}),
        (norms_that_nothing_exceeds, {"sum_not_mean"}),
    ],
)
def test_one_clipping_and_one_without_effect_are_not_called_clipped_in_parts(
    step: Any, names: set[str]
) -> None:
    verdict = different(case_of(), step)
    assert accepted(verdict) == names, verdict


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (each_parameter, "clipped_per_parameter"),
        (each_layer_before_reducing, "clipped_per_parameter"),
        (each_micro_batch, "clipped_per_micro_batch"),
        (scaled(ends="unscales"), "clipped_while_scaled"),
        (before_reducing, "clipped_before_reduce"),
    ],
)
def test_clipping_is_named_also_where_only_some_elements_are_kept(
    step: Any, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the norm is the one that torch has found on the ranks."""
    monkeypatch.setattr(shares, "MAX_ELEMENTS", 0)
    monkeypatch.setattr(shares, "MAX_SELECTED", 120)
    verdict = different(case_of(), step)
    assert verdict.view is not None
    assert not verdict.view.parameters.sample.is_whole
    assert first_finding(verdict).cause == cause, verdict
    assert len(faulty_lines(verdict)) == 1, verdict
    assert "clip_grad" in faulty_lines(verdict)[0], verdict


def test_a_cause_that_was_not_seen_to_happen_makes_none_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as in the further steps of a script, whose ranks are watched in one step only."""
    monkeypatch.setattr(shares, "MAX_ELEMENTS", 0)
    monkeypatch.setattr(shares, "MAX_SELECTED", 120)
    view = different(case_of(), before_reducing).view
    assert view is not None
    nothing_seen = replace(view, observed=replace(view.observed, by_rank={}))
    for hypothesis in HYPOTHESES:
        hypothesis.predict(nothing_seen)
