"""Buffers that each rank changes by itself are named where a later forward pass reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, check
from tests.diagnosis.where.faulty import CASE, NEAR, average, distance, loss
from tests.package.pointed_at import faulty_lines


class Centred(nn.Module):
    """Subtracts a moving average of what the layer before it gave in earlier steps."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, rows: Tensor) -> Any:
        hidden = self.first(rows)
        output = self.head(torch.tanh(hidden - self.centre))
        if self.training:
            self.follow(hidden.detach())
        return output

    def follow(self, hidden: Tensor) -> None:
        mean = hidden.mean(0)
        self.centre.lerp_(mean, 0.5)  # fault


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, rows: Tensor) -> Any:
        return self.layers(rows)


class Scaled(nn.Module):
    """Has a buffer that nothing changes."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((3,), 0.7))

    def forward(self, rows: Tensor) -> Any:
        return self.layer(rows) * self.scale


CENTRED = replace(CASE, model=Centred)


def by_hand(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    average(model)


def under_ddp(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


def test_buffers_that_differ_where_a_later_step_reads_them_are_named() -> None:
    verdict = check(CENTRED, by_hand, steps=2)
    assert verdict.causes == ("buffers_differ_between_ranks",), str(verdict)
    assert faulty_lines(verdict) == ["self.centre.lerp_(mean, 0.5)  # fault"]
    notes = [one.note for one in verdict.findings[0].lines]
    assert notes == ["changes centre, which differs between the ranks afterwards"]


def test_buffers_of_rank_0_that_all_ranks_read_are_shown() -> None:
    verdict = check(CENTRED, under_ddp, steps=2)
    assert (verdict.outcome, verdict.cause) == ("different", None), str(verdict)
    found = verdict.localisation.whereabouts
    assert found is not None
    assert found.headline.startswith("the ranks' mean loss is")
    assert distance(found, Centred) <= NEAR


@pytest.mark.parametrize("step", [by_hand, under_ddp])
def test_buffers_that_a_later_step_would_read_are_a_difference_in_one_step(
    step: Callable[..., Any],
) -> None:
    verdict = check(CENTRED, step)
    assert verdict.causes == ("buffers_differ_from_big_batch",), str(verdict)
    assert faulty_lines(verdict) == ["self.centre.lerp_(mean, 0.5)  # fault"]
    assert verdict.differing_buffers == ("centre",)
    assert "at the end the ranks hold different buffers: centre" in " ".join(
        verdict.full_report().split()
    )


def test_buffers_that_nothing_changes_are_not_mentioned() -> None:
    verdict = check(replace(CASE, model=Scaled), by_hand)
    assert (verdict.outcome, verdict.differing_buffers) == ("same", ())
    assert "different buffers" not in verdict.full_report()


def parted_before(model: Any, shard: Any, rank: Any) -> None:
    with torch.no_grad():
        model.layers[1].running_mean += rank.rank
    by_hand(model, shard, rank)


@pytest.mark.parametrize("step", [by_hand, parted_before])
def test_running_statistics_are_not_the_cause_of_what_batch_norm_does(
    step: Callable[..., Any],
) -> None:
    case: Case = replace(CASE, model=Normalised)
    verdict = check(case, step)
    assert verdict.cause == "batch_norm_local_statistics", str(verdict)
    assert verdict.differing_buffers == ("layers.1.running_mean", "layers.1.running_var")
