"""Ranks that take their examples from orders of their own."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Rank, check
from tests.diagnosis.causes.named import (
    accepted,
    case_of,
    different,
    faulty_lines,
    first_finding,
    loss,
)

Batch = dict[str, Tensor]

CASE = case_of(shards="own")


def train_on(model: nn.Module, batch: Batch, chosen: Any) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, {name: leaf[chosen] for name, leaf in batch.items()}).backward()


def seeded_by_rank(model: nn.Module, batch: Batch, rank: Rank) -> None:
    torch.manual_seed(5 + rank.rank)
    order = torch.randperm(len(batch["rows"]))
    own = len(order) // rank.world_size
    train_on(model, batch, order[rank.rank * own : (rank.rank + 1) * own])


def shuffled_list(model: nn.Module, batch: Batch, rank: Rank) -> None:
    order = list(range(len(batch["rows"])))
    random.Random(rank.rank).shuffle(order)
    train_on(model, batch, order[rank.rank :: rank.world_size])


def sampler_seeded_by_rank(model: nn.Module, batch: Batch, rank: Rank) -> None:
    dataset = TensorDataset(batch["rows"], batch["targets"])
    sampler: Any = DistributedSampler(dataset, 4, rank.rank, seed=rank.rank)
    rows, targets = next(iter(DataLoader(dataset, batch_size=6, sampler=sampler)))
    ddp = DistributedDataParallel(model)
    loss(ddp, {"rows": rows, "targets": targets}).backward()


def one_permutation(model: nn.Module, batch: Batch, rank: Rank) -> None:
    order = torch.randperm(len(batch["rows"]), generator=torch.Generator().manual_seed(3))
    train_on(model, batch, order[rank.rank :: rank.world_size])


def overlapping_slices(model: nn.Module, batch: Batch, rank: Rank) -> None:
    order = torch.randperm(len(batch["rows"]), generator=torch.Generator().manual_seed(3))
    begin = max(0, 6 * rank.rank - 1)  # one too early
    train_on(model, batch, order[begin : begin + 6])


def local_rank_for_rank(model: nn.Module, batch: Batch, rank: Rank) -> None:
    order = torch.randperm(len(batch["rows"]), generator=torch.Generator().manual_seed(3))
    train_on(model, batch, order[rank.local_rank :: rank.world_size])


def padded(model: nn.Module, batch: Batch, rank: Rank) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(
        cast(Any, range(22)), rank.world_size, rank.rank, shuffle=True, seed=4
    )
    train_on(model, batch, list(sampler))


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (seeded_by_rank, "torch.manual_seed(5 + rank.rank)"),
        (shuffled_list, "random.Random(rank.rank).shuffle(order)"),
        (
            sampler_seeded_by_rank,
            "sampler: Any = DistributedSampler(dataset, 4, rank.rank, seed=rank.rank)",
        ),
    ],
)
def test_an_order_of_every_rank_is_named_with_its_seed_or_shuffle(step: Any, line: str) -> None:
    verdict = different(CASE, step)
    finding = first_finding(verdict)
    assert finding.cause == "ranks_shuffle_apart", verdict
    assert accepted(verdict) == {"ranks_shuffle_apart"}, verdict
    assert faulty_lines(verdict)[0] == line, verdict
    assert finding.fix.startswith("shuffle with the same seed on every rank")


def test_slices_of_one_order_are_right() -> None:
    verdict = check(CASE, one_permutation)
    assert verdict.outcome == "same", verdict


@pytest.mark.parametrize("step", [overlapping_slices, local_rank_for_rank, padded])
def test_slices_of_one_order_that_overlap_are_not_called_shuffled_apart(step: Any) -> None:
    verdict = different(CASE, step)
    assert "ranks_shuffle_apart" not in accepted(verdict), verdict


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (overlapping_slices, "begin = max(0, 6 * rank.rank - 1)  # one too early"),
        (local_rank_for_rank, "train_on(model, batch, order[rank.local_rank :: rank.world_size])"),
    ],
)
def test_slices_of_one_order_that_overlap_have_a_name_and_the_line(step: Any, line: str) -> None:
    verdict = different(CASE, step)
    assert accepted(verdict) == {"shares_overlap"}, verdict
    assert line in faulty_lines(verdict), verdict


def slices_that_overlap(model: nn.Module, batch: Batch, rank: Rank) -> None:
    size = len(batch["rows"]) // rank.world_size
    start = min(size * rank.rank, len(batch["rows"]) - size - 2)
    train_on(model, batch, slice(start, start + size + 2))


def padded_to_batches_of_four(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Deals batches of 4 to the ranks, and fills up with the first examples."""
    count = len(batch["rows"])
    indices = torch.arange(-(-count // (4 * rank.world_size)) * 4 * rank.world_size) % count
    train_on(model, batch, indices.view(-1, 4)[rank.rank :: rank.world_size].flatten())


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (slices_that_overlap, "shares_overlap"),
        (padded_to_batches_of_four, "sampler_padding_counted"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_examples_that_need_no_padding_are_padded_only_by_a_sampler(step: Any, cause: str) -> None:
    assert accepted(different(case_of(shards="own"), step)) == {cause}
