"""Losses that are another statistic of the batch than a mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, check
from tests.diagnosis.causes.named import (
    accepted,
    case_of,
    different,
    faulty_lines,
    first_finding,
)

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def squares(model: nn.Module, batch: Batch) -> Tensor:
    outputs: Tensor = model(batch["rows"])
    return (outputs - batch["targets"]).square()


def root(model: nn.Module, batch: Batch) -> Tensor:
    return squares(model, batch).mean().sqrt()


def logarithm(model: nn.Module, batch: Batch) -> Tensor:
    return squares(model, batch).mean().log()


def median(model: nn.Module, batch: Batch) -> Tensor:
    return squares(model, batch).median()


def quantile(model: nn.Module, batch: Batch) -> Tensor:
    return torch.quantile(squares(model, batch).mean(1), 0.9)


def mean_of_valid(model: nn.Module, batch: Batch) -> Tensor:
    valid = (batch["targets"] > 0).to(batch["targets"].dtype)
    return (squares(model, batch) * valid).sum() / valid.sum()


def of_two_means(model: nn.Module, batch: Batch) -> Tensor:
    error = squares(model, batch)
    above, below = batch["targets"] > 0, batch["rows"][:, :3] > 0.5
    return error[above].mean() + error[below].mean()


def step_with(loss: Loss) -> Any:
    def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        loss(ddp, shard).backward()  # of the rank's shard

    return step


@pytest.mark.parametrize(
    ("loss", "because"),
    [
        (root, "the square of the loss is a mean over examples, and the loss itself is not"),
        (
            logarithm,
            "the exponential of the loss is a mean over examples, and the loss itself is not",
        ),
    ],
)
def test_a_loss_that_is_no_mean_is_named_by_what_it_is(loss: Loss, because: str) -> None:
    verdict = different(case_of(loss=loss), step_with(loss))
    finding = first_finding(verdict)
    assert accepted(verdict) == {"statistic_not_additive"}, verdict
    assert because in finding.because
    assert faulty_lines(verdict) == ["loss(ddp, shard).backward()  # of the rank's shard"], verdict
    assert finding.fix.startswith("gather what the statistic is taken of")


def mean_inside_the_root(model: nn.Module, shard: Batch, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    mean = squares(ddp, shard).mean()
    of_all = mean.detach().clone()
    dist.all_reduce(of_all)
    of_all /= rank.world_size
    (mean / (2 * of_all.sqrt())).backward()


def test_a_root_of_the_mean_of_all_ranks_is_right() -> None:
    verdict = check(case_of(loss=root), mean_inside_the_root)
    assert verdict.outcome == "same", verdict


@pytest.mark.parametrize("loss", [mean_of_valid, of_two_means])
def test_means_with_other_counts_are_no_other_statistic(loss: Loss) -> None:
    verdict = different(case_of(loss=loss), step_with(loss))
    assert "statistic_not_additive" not in accepted(verdict), verdict


def noisy(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch["rows"])
    return F.mse_loss(outputs + torch.randn_like(outputs), batch["targets"])


def noisy_not_averaged(model: nn.Module, shard: Batch, rank: Rank) -> None:
    noisy(model, shard).backward()


def test_random_numbers_are_no_other_statistic() -> None:
    assert check(case_of(loss=noisy), step_with(noisy)).outcome == "same"
    verdict = different(case_of(loss=noisy), noisy_not_averaged)
    assert "statistic_not_additive" not in accepted(verdict), verdict


def root_not_averaged(model: nn.Module, shard: Batch, rank: Rank) -> None:
    root(model, shard).backward()


def test_a_root_that_is_not_reduced_is_called_not_reduced() -> None:
    verdict = different(case_of(loss=root), root_not_averaged)
    assert verdict.cause == "no_all_reduce", verdict
    assert "statistic_not_additive" not in accepted(verdict)
