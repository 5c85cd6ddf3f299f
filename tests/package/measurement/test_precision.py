"""A step that float64 does not show as it is, is judged in the precision of its model as well."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.diagnosis.unknown import UnknownBecause

pytestmark = pytest.mark.self_check


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(24, 6, generator=generator),
        "targets": torch.randn(24, 3, generator=generator),
    }


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"])


def case(
    dtype: torch.dtype | None = torch.float64, model: Callable[[], nn.Module] = build_model
) -> Case:
    return Case(model=model, batch=batch, loss=loss, layout="1x2", dtype=dtype)


def average(model: nn.Module, rank: Rank, divisor: float | None = None) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        assert parameter.grad is not None
        parameter.grad /= divisor or rank.world_size


def with_autocast(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(ddp, shard)
    value.backward()


def with_autocast_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank.rank == 1):
        value = loss(ddp, shard)
    value.backward()


def wrong_only_under_autocast(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Multiplies by the world size wherever autocast has made the output bfloat16."""
    ddp = DistributedDataParallel(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ddp(shard["rows"])
    factor = rank.world_size if output.dtype is torch.bfloat16 else 1
    (factor * F.mse_loss(output.to(shard["targets"].dtype), shard["targets"])).backward()


def evaluates_under_autocast_on_rank_0(model: nn.Module, shard: Any, rank: Rank) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank.rank == 0):
        model(shard["rows"])
    loss(model, shard).backward()
    average(model, rank)


def with_a_float32_constant(model: nn.Module, shard: Any, rank: Rank) -> None:
    scale = torch.full((3,), 1 / 3)
    output = model(shard["rows"])
    (3 * (scale * (output - shard["targets"]) ** 2).mean()).backward()
    average(model, rank)


def with_a_float32_constant_and_a_wrong_divisor(model: nn.Module, shard: Any, rank: Rank) -> None:
    scale = torch.full((3,), 1 / 3)
    output = model(shard["rows"])
    (3 * (scale * (output - shard["targets"]) ** 2).mean()).backward()
    average(model, rank, divisor=rank.world_size * (1 + 1e-4))


def with_a_float32_all_reduce(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        narrow = parameter.grad.float()
        dist.all_reduce(narrow)
        parameter.grad.copy_(narrow / rank.world_size)


def off_by_a_little(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    average(model, rank, divisor=rank.world_size * (1 + 1e-7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, None], ids=str)
def test_a_right_step_with_autocast_is_the_same(dtype: torch.dtype | None) -> None:
    verdict = check(case(dtype), with_autocast)
    assert verdict.outcome == "same", verdict
    assert verdict.autocast is torch.bfloat16


def test_the_report_says_that_autocast_does_nothing_in_float64_and_what_it_does() -> None:
    verdict = check(case(), with_autocast)
    assert verdict.again.other_precision is not None
    assert verdict.again.other_precision.outcome == "same"
    text = " ".join(verdict.full_report().split())
    assert "enters autocast (bfloat16), which does nothing in float64" in text
    assert "In float32 with autocast (bfloat16) it was checked as well: same, error" in text


def test_a_fault_that_only_autocast_brings_out_is_different() -> None:
    verdict = check(case(), wrong_only_under_autocast)
    assert (verdict.outcome, verdict.cause) == ("different", "sum_not_mean"), verdict
    assert "In float64, where autocast (bfloat16) does nothing, the outcome is same." in " ".join(
        verdict.full_report().split()
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_autocast_on_one_rank_alone_is_unknown(dtype: torch.dtype) -> None:
    verdict = check(case(dtype), with_autocast_on_one_rank)
    assert verdict.unknown_because is UnknownBecause.AUTOCAST_DIFFERS, verdict
    assert "rank 0: none, rank 1: cpu bfloat16" in verdict.reason


def test_autocast_without_gradients_on_one_rank_does_not_matter() -> None:
    assert check(case(), evaluates_under_autocast_on_rank_0).outcome == "same"


def test_autocast_around_a_model_in_float64_is_said_to_do_nothing() -> None:
    verdict = check(case(model=lambda: build_model().double()), with_autocast)
    assert verdict.outcome == "same"
    assert verdict.again.other_precision is None
    assert "the step was checked in no other precision" in " ".join(verdict.full_report().split())


@pytest.mark.parametrize("step", [with_a_float32_constant, with_a_float32_all_reduce])
def test_float32_inside_a_check_in_float64_is_judged_in_float32(step: Any) -> None:
    verdict = check(case(), step)
    assert verdict.outcome == "same", verdict
    text = " ".join(verdict.full_report().split())
    assert "the rounding of float32, because the step computes in float32:" in text
    assert "test_precision.py:" in text


def test_a_fault_beside_float32_is_still_different() -> None:
    verdict = check(case(), with_a_float32_constant_and_a_wrong_divisor)
    assert verdict.outcome == "different", verdict


def test_a_small_fault_without_float32_is_different() -> None:
    verdict = check(case(), off_by_a_little)
    assert verdict.outcome == "different"
    assert verdict.again.float32_at == ""


def test_float32_in_a_model_that_is_built_in_float64_is_told_and_is_different() -> None:
    verdict = check(case(model=lambda: build_model().double()), with_a_float32_constant)
    assert verdict.outcome == "different"
    text = " ".join(verdict.full_report().split())
    assert "the step computes in float32 inside this check in float64" in text
    assert "check it in float32 with Case(dtype=torch.float32)" in text
    assert "other weights" not in text


def off_by_a_little_beside_flags_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    loss(model, shard).backward()
    mask = torch.ones(len(shard["rows"]))
    assert bool((mask.unsqueeze(1) * shard["rows"]).isfinite().all())
    average(model, rank, divisor=rank.world_size * (1 + 1e-7))


def test_masks_and_flags_in_float32_hide_no_small_fault() -> None:
    verdict = check(case(), off_by_a_little_beside_flags_in_float32)
    assert (verdict.outcome, verdict.again.float32_at) == ("different", "")


def autocast_elsewhere_and_a_wrong_factor(model: nn.Module, shard: Any, rank: Rank) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.ones(2, 2) @ torch.ones(2, 2)
    loss(model, shard).backward()
    average(model, rank, divisor=rank.world_size / 1.03)


def test_autocast_elsewhere_hides_no_wrong_factor() -> None:
    """Its limits of 6 % would, so such a step is judged in float64 as well."""
    verdict = check(case(torch.float32), autocast_elsewhere_and_a_wrong_factor)
    assert verdict.outcome == "different", verdict
    assert "In float32 with autocast (bfloat16) it was checked as well: same" in " ".join(
        verdict.full_report().split()
    )


def test_the_floor_under_autocast_is_that_of_one_device_under_autocast() -> None:
    verdict = check(case(torch.float32), with_autocast)
    assert verdict.error is not None
    assert verdict.floor is not None
    assert 0.1 * verdict.error < verdict.floor < 10 * verdict.error


def classes(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(3, (24,), generator=generator)
    labels[torch.rand(24, generator=generator) < 0.4] = -100
    return {"rows": torch.randn(24, 6, generator=generator), "labels": labels}


def loss_in_float32(model: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
    """Widen the scores to float32, as libraries do that expect bfloat16."""
    scores = model(batch["rows"]).float()
    return F.cross_entropy(scores, batch["labels"], reduction=reduction)


def case_with_a_loss_in_float32() -> Case:
    return Case(model=build_model, batch=classes, loss=loss_in_float32, layout="1x3")


def over_all_labels(
    model: nn.Module, shard: Any, rank: Rank, pieces: int = 2, factor: float = 1.0
) -> None:
    """Accumulate over pieces; every term is divided by the number of labels on all ranks."""
    ddp, count = DistributedDataParallel(model), (shard["labels"] != -100).sum()
    dist.all_reduce(count)
    for number in range(pieces):
        piece = {name: leaf[number::pieces] for name, leaf in shard.items()}
        total = loss_in_float32(ddp, piece, reduction="sum")
        with ddp.no_sync() if number + 1 < pieces else nullcontext():
            (total * rank.world_size / count).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= factor


def trained_for_two_steps(model: nn.Module, shard: Any, rank: Rank, factor: float = 1.0) -> None:
    for step in range(2):
        model.zero_grad()
        rows = {name: leaf.chunk(2)[step] for name, leaf in shard.items()}
        over_all_labels(model, rows, rank, factor=factor)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)


def averaged_twice(model: nn.Module, shard: Any, rank: Rank) -> None:
    over_all_labels(model, shard, rank)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= rank.world_size


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_case_whose_own_loss_is_in_float32_is_the_same_in_float64(pieces: int) -> None:
    verdict = check(case_with_a_loss_in_float32(), partial(over_all_labels, pieces=pieces))
    assert verdict.outcome == "same", verdict
    assert verdict.is_in_float64
    assert verdict.again.other_precision is None
    assert "computing in float32 inside float64" in verdict.full_report()


def test_a_fault_beside_a_loss_in_float32_is_different_and_has_its_name() -> None:
    verdict = check(case_with_a_loss_in_float32(), averaged_twice)
    assert (verdict.outcome, verdict.cause) == ("different", "averaged_twice"), verdict


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "same"), (1.001, "different")])
def test_weights_after_two_steps_of_a_loss_in_float32(factor: float, outcome: str) -> None:
    step = partial(trained_for_two_steps, factor=factor)
    verdict = check(case_with_a_loss_in_float32(), step, compare="update", steps=2)
    assert verdict.outcome == outcome, verdict
    assert verdict.is_in_float64


def test_a_step_in_float32_is_judged_in_float32_before_anything_is_explained() -> None:
    verdict = check(case(), with_a_float32_constant)
    assert verdict.outcome == "same", verdict
    assert verdict.again.other_precision is not None
    assert verdict.again.other_precision.outcome == "different"
    assert verdict.again.other_precision.findings == ()
