"""Break it on purpose and it goes red: no strategy, rank or guard can fail unseen."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import (
    Case,
    NotEquivalent,
    NothingCompared,
    Rank,
    assert_equivalent,
    check,
)
from ddp_equivalence.comparison.comparison import compare
from ddp_equivalence.comparison.tolerance import Noise, Tolerance
from ddp_equivalence.diagnosis import vacuity
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.diagnosis.vacuity import NearestFault
from tests.package.own_cases import build_model, loss, make_batch, own_case, right_step

Gradients = dict[str, Tensor | None]


def summed(model: nn.Module, shard: Any, rank: Rank) -> None:
    """By hand, without the division."""
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)


def zeroed_on_rank_1(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= rank.rank != 1


def one_parameter_missing(model: nn.Module, shard: Any, rank: Rank) -> Gradients:
    right_step(model, shard, rank)
    return {n: p.grad for n, p in model.named_parameters() if n != "2.bias"}


def nothing_on_rank_1(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    if rank.rank == 1:
        model.zero_grad(set_to_none=True)


def nothing_anywhere(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    model.zero_grad(set_to_none=True)


def one_bit_apart(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    bias = model.get_parameter("2.bias").grad
    assert bias is not None
    bias *= 1 + rank.rank * 2**-52


def single_precision(model: nn.Module, shard: Any, rank: Rank) -> Gradients:
    right_step(model, shard, rank)
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


def raw_module_called(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp.module, shard).backward()


def scaled_after_the_fact(model: nn.Module, shard: Any, rank: Rank) -> None:
    right_step(model, shard, rank)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= rank.world_size


@pytest.mark.parametrize(
    ("step", "cause", "says"),
    [
        (summed, "sum_not_mean", "every rank holds 2.00 2.00"),
        (scaled_after_the_fact, "averaged_twice", "every rank holds 0.50 0.50"),
        (raw_module_called, "raw_module_called", "rank 0 holds 2.00 0.00"),
        (zeroed_on_rank_1, None, "rank 1 holds 0.00 0.00"),
        (one_parameter_missing, None, "every rank: 2.bias is missing"),
        (nothing_on_rank_1, None, "rank 1: 0.weight is None, expected (7, 5) float64"),
        (one_bit_apart, "ranks_differ_by_rounding", "the ranks round differently"),
        (single_precision, None, "0.weight is float32 instead of float64"),
    ],
)
def test_a_broken_step_is_different_and_the_report_says_how(
    step: Any, cause: str | None, says: str
) -> None:
    with pytest.raises(NotEquivalent) as caught:
        assert_equivalent(own_case(), step)
    assert caught.value.verdict.cause == cause
    assert says in " ".join(caught.value.verdict.full_report().split())


def test_a_step_that_leaves_no_gradient_is_no_pass() -> None:
    with pytest.raises(NothingCompared, match="The step left no gradient on any rank"):
        assert_equivalent(own_case(), nothing_anywhere)


def zero_loss(model: nn.Module, batch: Any) -> Tensor:
    return 0 * loss(model, batch)


def overflowing_loss(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch) * float("inf")


def constant_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.ones_like(leaf) for name, leaf in make_batch(generator).items()}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": zero_loss}, "the big batch's own gradient is zero"),
        ({"loss": overflowing_loss}, "the big batch's own gradient is not finite"),
        ({"batch": constant_batch}, "all ranks were given identical inputs"),
    ],
)
def test_a_case_that_could_not_show_a_fault_is_unknown(changes: Any, says: str) -> None:
    verdict = check(own_case(**changes), right_step)
    assert verdict.outcome == "unknown"
    assert says in verdict.reason
    assert "which is not a pass" in str(verdict)


def test_an_update_that_moves_nothing_is_unknown() -> None:
    verdict = check(own_case(loss=zero_loss), right_step, compare="update")
    assert verdict.outcome == "unknown"
    assert "nothing moved" in verdict.reason


def whole_batch_on_every_rank(model: nn.Module, batch: Any, rank: Rank) -> None:
    loss(model, batch).backward()


def whole_batch_under_ddp(model: nn.Module, batch: Any, rank: Rank) -> None:
    """A forgotten sampler: the average of equal gradients is the big batch."""
    right_step(model, batch, rank)


def looks_at_its_own_first(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Then the whole batch: inputs differ, a wrapper was made, and nothing is exchanged."""
    ddp = DistributedDataParallel(model)
    model(batch["rows"][rank.rank :])
    loss(ddp.module, batch).backward()


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (whole_batch_on_every_rank, "identical inputs on all ranks"),
        (whole_batch_under_ddp, "identical inputs on all ranks"),
        (looks_at_its_own_first, "the ranks exchanged no gradient"),
    ],
)
def test_ranks_that_each_compute_the_big_batch_show_nothing(step: Any, says: str) -> None:
    verdict = check(own_case(shards="own"), step)
    assert verdict.outcome == "unknown"
    assert says in verdict.reason


def test_a_limit_above_the_signal_is_no_pass() -> None:
    truth = {"weight": torch.ones(4, dtype=torch.float64)}
    single = {0: {"weight": torch.ones(4)}}
    found = compare(truth, single, Tolerance(torch.float32))
    assert vacuity.against_a_pass(found, {}, lambda: NearestFault("sum_not_mean", 1.0)) is None
    hidden = vacuity.against_a_pass(found, {}, lambda: NearestFault("sum_not_mean", 5e-6))
    assert hidden == Unknown(
        UnknownBecause.LIMIT_ABOVE_SIGNAL,
        "the limit lies above the signal: sum_not_mean would pass on this case",
    )
    noise = {"weight": Noise(norm=1.0, element=1.0)}
    noisy = compare(truth, {0: {"weight": 2 * truth["weight"]}}, Tolerance(torch.float64), noise)
    assert noisy.same
    assert "for weight: the big batch's own gradient moves that far by rounding alone" in str(
        vacuity.against_a_pass(noisy, {}, lambda: None)
    )


def test_data_parallel_with_one_replica_is_unknown() -> None:
    """On one device nn.DataParallel just calls the module, which is the big batch for free."""
    verdict = check(Case(model="mlp", loss="mse_mean", layout="1x1"), "emulated_data_parallel")
    assert verdict.outcome == "unknown"
    assert "did not really run: it needs 2 replicas and had 1" in verdict.reason


def test_ranks_that_build_other_weights_than_the_reference_are_unknown() -> None:
    def build_by_rank() -> nn.Module:
        import os

        torch.manual_seed(int(os.environ.get("RANK", 0)))
        return build_model()

    def by_hand(model: nn.Module, shard: Any, rank: Rank) -> None:
        summed(model, shard, rank)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= rank.world_size

    verdict = check(own_case(model=build_by_rank), by_hand)
    assert verdict.outcome == "unknown"
    assert "rank 1 builds other weights than the reference" in verdict.reason


def test_a_model_that_is_another_one_at_each_call_is_unknown() -> None:
    """The ranks and the reference build the first one; limits are measured with the next ones."""
    numbers = itertools.count()

    def build_another() -> nn.Module:
        torch.manual_seed(next(numbers))
        return build_model()

    verdict = check(own_case(model=build_another), right_step)
    assert verdict.outcome == "unknown", verdict
    assert "build other weights than the reference" in verdict.reason
