"""What a report says of the examples that were read, and of gradients of earlier passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Rank, check
from tests.diagnosis.names.small_case import Step, average, case, report_of
from tests.package.own_cases import loss as squares

pytestmark = pytest.mark.self_check


def trains_on_a_sampler(model: nn.Module, batch: Any, rank: Rank, **options: Any) -> None:
    data = TensorDataset(batch["rows"], batch["targets"])
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, rank.world_size, rank.rank, **options
    )
    for rows, targets in DataLoader(data, batch_size=len(data), sampler=sampler):
        F.mse_loss(model(rows), targets).backward()
    average(model, rank.world_size)


def shuffles_apart(model: nn.Module, batch: Any, rank: Rank) -> None:
    trains_on_a_sampler(model, batch, rank, seed=rank.rank)


def pads(model: nn.Module, batch: Any, rank: Rank) -> None:
    trains_on_a_sampler(model, batch, rank, shuffle=False)


def test_ranks_that_shuffle_apart_pad_nothing() -> None:
    verdict = check(case(shards="own"), shuffles_apart)
    assert verdict.outcome == "different"
    assert "sampler_padding_counted" not in verdict.causes, verdict


def test_a_sampler_that_pads_is_named() -> None:
    verdict = check(case("1x5", shards="own"), pads)
    assert verdict.causes == ("sampler_padding_counted",), verdict


def probes_by_hand(model: nn.Module, shard: Any, rank: Rank) -> None:
    few = {name: leaf[: len(leaf) // 2] for name, leaf in shard.items()}
    squares(model, few).backward()
    squares(model, shard).backward()
    average(model, rank.world_size)


def test_an_earlier_backward_over_a_part_is_stale_and_no_padding() -> None:
    verdict = check(case("1x4"), probes_by_hand)
    assert verdict.causes == ("stale_gradient_added",), verdict
    assert "backward was called 2 times in this step" in report_of(verdict)


def gathered(own: Tensor, world_size: int, keeps_own: bool = True) -> Tensor:
    """What all ranks hold; only the own part carries a gradient, or nothing does."""
    parts = [torch.zeros_like(own) for _ in range(world_size)]
    dist.all_gather(parts, own.detach())
    if keeps_own:
        parts[dist.get_rank()] = own
    return torch.cat(parts)


def puts_its_own_slice_back(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    outputs = gathered(ddp(shard["rows"]), rank.world_size)
    F.mse_loss(outputs, gathered(shard["targets"], rank.world_size)).backward()


@pytest.mark.parametrize("layout", ["1x2", "1x4"])
def test_outputs_gathered_without_a_gradient_are_not_averaged_twice(layout: str) -> None:
    verdict = check(case(layout, loss=squares), puts_its_own_slice_back)
    assert verdict.causes == ("gather_without_gradient",), verdict
    assert "begins at the loss of the whole batch on every rank" in report_of(verdict)


def matches(outputs: Tensor, others: Tensor, first: int = 0) -> Tensor:
    """Each of the outputs must be more like its own other one than like all others."""
    return F.cross_entropy(outputs @ others.T, torch.arange(len(outputs)) + first)


def of_pairs(model: nn.Module, batch: Any) -> Tensor:
    return matches(model(batch["rows"]), model(batch["rows"] + 0.5))


def matches_own_rows(keeps_own: bool, with_gradient: bool = False, times: float = 1.0) -> Step:
    """Each rank's own rows are matched with those of all ranks."""

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        rows = shard["rows"]
        outputs, others = ddp(torch.cat([rows, rows + 0.5])).chunk(2)
        if with_gradient:
            everybody = torch.cat(list(all_gather(others)))
        else:
            everybody = gathered(others, rank.world_size, keeps_own)
        (times * matches(outputs, everybody, first=len(rows) * int(rank))).backward()

    return step


@pytest.mark.parametrize(("keeps_own", "layout"), [(True, "1x2"), (False, "1x4")])
def test_own_rows_against_outputs_gathered_without_a_gradient_are_named(
    keeps_own: bool, layout: str
) -> None:
    verdict = check(case(layout, loss=of_pairs), matches_own_rows(keeps_own))
    assert verdict.causes == ("gather_without_gradient",), verdict
    assert "Seen to happen; its effect on the numbers cannot be computed." in report_of(verdict)


def test_a_gather_that_passes_the_gradient_on_is_not_named() -> None:
    """Something else is wrong, after the gradients have been computed."""

    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        matches_own_rows(True, with_gradient=True)(model, shard, rank)
        spoil(model)

    assert check(case(loss=of_pairs), matches_own_rows(True, with_gradient=True)).outcome == "same"
    assert "gather_without_gradient" not in check(case(loss=of_pairs), step).causes


def spoil(model: nn.Module) -> None:
    """Change the gradients in a way that no cause predicts."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.02)


@pytest.mark.parametrize("is_spoilt", [True, False])
def test_a_count_that_is_summed_in_the_forward_pass_is_no_gather(is_spoilt: bool) -> None:
    """A loss is then not that of the rank's rows alone, and the mean of the losses is right."""

    def by_the_count_of_all(model: nn.Module, shard: Any, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        errors = (ddp(shard["rows"]) - shard["targets"]).square()
        seen = torch.stack([errors.detach().sum(), torch.tensor(float(errors.numel()))])
        dist.all_reduce(seen)
        (errors.sum() * rank.world_size / seen[1]).backward()
        if is_spoilt:
            spoil(model)

    uneven = case(loss=squares, shards="uneven")
    verdict = check(uneven, by_the_count_of_all)
    assert verdict.outcome == ("different" if is_spoilt else "same")
    assert "gather_without_gradient" not in verdict.causes, verdict


def adds_up_halves(model: nn.Module, shard: Any, rank: Rank) -> None:
    dist.new_group([0, 1])
    for rows, targets in zip(shard["rows"].chunk(2), shard["targets"].chunk(2), strict=True):
        F.mse_loss(model(rows), targets).backward()
    average(model, rank.world_size)


def test_undivided_accumulation_in_a_step_that_makes_a_group_is_no_sum_over_ranks() -> None:
    verdict = check(case(), adds_up_halves)
    assert verdict.causes == ("accumulation_not_divided",), verdict
