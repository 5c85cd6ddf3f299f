"""Ranks that compare their own gradients come to what the judging process would have come to."""

from __future__ import annotations

import errno
import itertools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp_equivalence.comparison.blocks import Block
from ddp_equivalence.comparison.chunks import chunks
from ddp_equivalence.comparison.comparison import Comparator, Comparison
from ddp_equivalence.comparison.gradients import ElementSample, describe
from ddp_equivalence.comparison.shared import (
    ComparedHere,
    SharedGradients,
    compared_here,
    kept_of,
    shared_gradients,
)
from ddp_equivalence.comparison.sums import Sums, on_cpu, on_device
from ddp_equivalence.comparison.tolerance import Tolerance

GENERATOR = torch.Generator().manual_seed(0)
TRUE = {
    (0, "weight"): torch.randn(50, 40, generator=GENERATOR, dtype=torch.float64),
    (0, "bias"): torch.randn(40, generator=GENERATOR, dtype=torch.float64),
    (0, "scalar"): torch.tensor(2.0, dtype=torch.float64),
    (0, "zeros"): torch.zeros(3, dtype=torch.float64),
    (0, "sparse"): torch.eye(3, dtype=torch.float64).to_sparse(1),
    (0, "empty"): torch.zeros(0, 4, dtype=torch.float64),
    (0, "frozen"): None,
}
SIZES = {key: one.numel() for key, one in TRUE.items() if one is not None}
SAMPLE = ElementSample(SIZES, dict.fromkeys(SIZES, 3))


def measured(**changes: Tensor | None) -> dict[tuple[int, str], Tensor | None]:
    copies = {key: None if one is None else one.clone() for key, one in TRUE.items()}
    return copies | {(0, name): one for name, one in changes.items()}


def weight(change: float, row: int = 7, column: int = 9) -> Tensor:
    changed = measured()[0, "weight"]
    assert changed is not None
    changed[row, column] += change
    return changed


def sent(*ranks: Mapping[tuple[int, str], Tensor | None]) -> Comparison:
    comparator = Comparator(TRUE, describe(TRUE), Tolerance(torch.float64))
    for rank, gradients in enumerate(ranks):
        comparator.begin(rank, describe(gradients))
        for chunk in chunks(gradients):
            comparator.add(rank, chunk)
    return comparator.finish({})


def by_themselves(*ranks: Mapping[tuple[int, str], Tensor | None]) -> Comparison:
    comparator = Comparator(TRUE, describe(TRUE), Tolerance(torch.float64))
    here: dict[int, ComparedHere] = {}
    with shared_gradients(wanted=True) as shared:
        assert shared is not None
        shared.put(dict(TRUE), SAMPLE, torch.float64)
        for rank, gradients in enumerate(ranks):
            comparator.begin(rank, describe(gradients))
            found = compared_here(shared.address, gradients)
            assert found is not None
            here[rank] = found
    comparator.take(here)
    return comparator.finish({})


@pytest.mark.parametrize(
    "ranks",
    [
        (measured(), measured()),
        (measured(weight=weight(1.0)), measured()),
        (measured(weight=weight(1e-15)), measured(weight=weight(1e-15))),
        (measured(weight=weight(math.nan)), measured()),
        (measured(weight=weight(math.inf)), measured()),
        (measured(bias=None), measured()),
        (measured(bias=torch.zeros(41)), measured()),
        (measured(frozen=torch.zeros(2), zeros=None), measured()),
        (measured(frozen=torch.ones(2)), measured(zeros=torch.ones(3))),
        (measured(weight=weight(0.0).float()), measured()),
    ],
)
def test_ranks_that_compare_by_themselves_find_what_the_judging_process_finds(
    ranks: tuple[dict[tuple[int, str], Tensor | None], ...],
) -> None:
    expected, found = sent(*ranks), by_themselves(*ranks)
    assert found.by_the_ranks
    assert not expected.by_the_ranks
    assert found.digests == expected.digests
    assert repr(replace(found, by_the_ranks=False)) == repr(expected)


@pytest.mark.parametrize("place", [0, 8191, 8192, 15_000, 19_999])
@pytest.mark.parametrize("begins", [(0,), (0, 7_000), (0, 9_000, 14_000)])
def test_the_worst_element_of_a_large_gradient_is_found_where_it_is(
    place: int, begins: tuple[int, ...]
) -> None:
    truth = np.ones(20_000)
    values = torch.ones(20_000, dtype=torch.float64)
    values[place] = 1.5
    sums = Sums()
    for begin, end in itertools.pairwise([*begins, 20_000]):
        sums.take(begin, values[begin:end], truth[begin:end], 1.0)
    assert (sums.place, sums.element, sums.largest) == (place, 0.5, 0.5)
    assert (sums.difference, sums.seen) == (0.25, 20_000)


def test_the_elements_of_the_sample_are_kept() -> None:
    with shared_gradients(wanted=True) as shared:
        assert shared is not None
        shared.put(dict(TRUE), SAMPLE, torch.float64)
        here = compared_here(shared.address, measured())
    assert here is not None
    for key in ((0, "weight"), (0, "bias"), (0, "scalar")):
        one = TRUE[key]
        assert one is not None
        assert torch.equal(kept_of({0: here}, 0, key, SAMPLE.size(key)), one.reshape(-1)[::3])


@pytest.mark.parametrize("values", [[1.0, -2.0, 3.5, 0.0], [0.0] * 4, [1.0, 2.0, 3.0, math.nan]])
def test_a_device_adds_up_the_same(values: list[float]) -> None:
    truth = np.array([1.0, -2.0, 3.0, 0.0])
    on_both = [on_cpu, on_device]
    here, there = (add(torch.tensor(values).double(), truth, 1.5) for add in on_both)
    assert here == pytest.approx(there, nan_ok=True)


def test_gradients_that_were_put_into_the_file_are_those_that_were_there() -> None:
    own = dict(TRUE)
    shared = SharedGradients()
    shared.put(own, SAMPLE, torch.float64)
    shared.close()
    for key, one in TRUE.items():
        held = own[key]
        assert (held is None) == (one is None)
        if one is not None and held is not None and one.numel():
            assert held.layout == one.layout
            assert torch.equal(held.to_dense(), one.to_dense())
            assert one.is_sparse or held.data_ptr() != one.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_of_another_precision_are_compared_with_numbers_of_float32(
    dtype: torch.dtype,
) -> None:
    own = dict(TRUE)
    right = {key: None if one is None else one.to(dtype) for key, one in TRUE.items()}
    with shared_gradients(wanted=True) as shared:
        assert shared is not None
        shared.put(own, SAMPLE, dtype)
        size = Path(shared.address).stat().st_size
        here = compared_here(shared.address, right)
    held = own[0, "weight"]
    assert held is not None
    assert (held.dtype, size // (8 * sum(SIZES.values()))) == (torch.float32, 0)
    described = describe(right)
    by_ranks, by_judge = (Comparator(truth, described, Tolerance(dtype)) for truth in (own, TRUE))
    assert here is not None
    for one in (by_ranks, by_judge):
        one.begin(0, described)
    by_ranks.take({0: here})
    for chunk in chunks(right):
        by_judge.add(0, chunk)
    for found, known in zip(
        by_ranks.finish({}).parameters, by_judge.finish({}).parameters, strict=True
    ):
        assert found.norm == pytest.approx(known.norm, rel=1e-7)
        assert found.error == pytest.approx(known.error, abs=1e-7)
        assert found.by_rank[0].within


def test_a_rank_waits_until_the_true_gradients_are_there() -> None:
    with shared_gradients(wanted=True) as shared, ThreadPoolExecutor() as pool:
        assert shared is not None
        found = pool.submit(compared_here, shared.address, measured(weight=weight(1.0)))
        with pytest.raises(TimeoutError):
            found.result(0.2)
        shared.put(dict(TRUE), SAMPLE, torch.float64)
        here = found.result(20)
    assert here is not None
    assert here.sums[0, "weight"].largest == pytest.approx(1.0)


def test_a_rank_that_cannot_read_the_file_says_so() -> None:
    assert compared_here("/proc/self/fd/9999", measured()) is None


def test_without_room_on_the_disk_ranks_are_told_to_send_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    own = dict(TRUE)
    with shared_gradients(wanted=True) as shared:
        assert shared is not None
        monkeypatch.setattr("os.posix_fallocate", full)
        shared.put(own, SAMPLE, torch.float64)
        assert compared_here(shared.address, measured()) is None
    assert all(own[key] is one for key, one in TRUE.items())
    with shared_gradients(wanted=True) as shared:
        assert shared is None


def test_nothing_is_left_of_the_file() -> None:
    with shared_gradients(wanted=True) as shared:
        assert shared is not None
        assert Path(shared.address).exists()
    assert not Path(shared.address).exists()


# Blocks of sharded gradients.


@pytest.mark.parametrize(
    ("begins", "shape"),
    [
        ((0, 0), (25, 40)),
        ((20, 0), (30, 40)),
        ((10, 7), (3, 5)),
        ((0, 39), (50, 1)),
        ((50, 0), (0, 40)),
    ],
)
def test_places_in_a_block_are_those_in_the_whole(
    begins: tuple[int, int], shape: tuple[int, int]
) -> None:
    one = TRUE[0, "weight"]
    assert one is not None
    block = Block((50, 40), begins, shape, (0, 1))
    local = one[block.inside].clone()
    numbers, own = block.places_of(range(0, 2000, 7))
    assert torch.equal(one.reshape(-1)[::7][torch.from_numpy(numbers)], local.reshape(-1)[own])
    sums = Sums()
    for offset, values, right in block.parts(local, one.reshape(-1).numpy()):
        assert np.array_equal(values.numpy(), right)
        sums.take(offset, values, right, 1.0)
    assert sums.seen == local.numel()
    assert sums.difference == 0
    if local.numel():
        last = tuple(a + n - 1 for a, n in zip(begins, shape, strict=True))
        assert block.place_in_whole(local.numel() - 1) == last[0] * 40 + last[1]


def test_the_blocks_of_all_holders_make_the_whole() -> None:
    changed, truth = weight(0.5, row=30, column=3), TRUE[0, "weight"]
    assert truth is not None
    here: dict[int, ComparedHere] = {}
    cuts = {0: ((0, 0), (20, 40)), 1: ((20, 0), (20, 40)), 2: ((40, 0), (10, 40))}
    for rank, (begins, shape) in cuts.items():
        block = Block((50, 40), begins, shape, (0, 1, 2))
        sums, local = Sums(), changed[block.inside]
        for offset, values, right in block.parts(local, truth.reshape(-1).numpy()):
            sums.take(offset, values, right, float(truth.norm()) / math.sqrt(2000))
        numbers, own = block.places_of(range(0, 2000, 3))
        here[rank] = ComparedHere(
            {(0, "weight"): sums.sent()},
            {(0, "weight"): local.reshape(-1)[own]},
            {(0, "weight"): block},
            {(0, "weight"): numbers},
        )
    only = {(0, "weight"): truth}
    comparator = Comparator(only, describe(only), Tolerance(torch.float64))
    for rank in cuts:
        comparator.begin(rank, describe({(0, "weight"): changed}))
    comparator.take(here)
    comparison = comparator.finish({})
    assert comparison.ranks_agree
    assert [one.place for one in comparison.parameters[0].by_rank] == [(30, 3)] * 3
    assert comparison.parameters[0].worst.distance == pytest.approx(0.5)
    assert comparison.parameters[0].worst.alone
    assert torch.equal(kept_of(here, 1, (0, "weight"), 667), changed.reshape(-1)[::3])
