"""Collectives that return wrong results are found and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ddp_equivalence import Rank
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks.lanes import choose
from ddp_equivalence.ranks.probe import (
    ProbeResult,
    probe_ranks,
    run,
    summarise_refusals,
)
from ddp_equivalence.ranks.warm_ranks import warm_ranks

Work = Callable[[Rank, object], Iterator[object]]
Collective = Callable[..., Any]


def probe_with(name: str, make_wrong: Callable[[Collective, Rank], Collective]) -> Work:
    """The probe, while ``dist.<name>`` is replaced by ``make_wrong(dist.<name>, rank)``."""

    def work(rank: Rank, argument: object) -> Iterator[object]:
        with patch.object(dist, name, make_wrong(getattr(dist, name), rank)):
            yield from run(rank, argument)

    return work


def results(layout: str, work: Work = run) -> tuple[ProbeResult, ...]:
    parsed = parse(layout)
    with warm_ranks().acquire(parsed, choose(parsed, "gloo"), 15.0) as ranks:
        return probe_ranks(ranks, work=work)


@pytest.mark.parametrize("layout", ["1x1", "1x2", "1+2"])
def test_the_collectives_of_this_torch_are_correct(layout: str) -> None:
    probed = results(layout)
    assert [result for result in probed if result.wrong] == []
    correct = {result.collective.split()[0] for result in probed if result.correct}
    assert correct == {"all_reduce", "reduce_scatter", "all_gather", "broadcast"}


def test_groups_of_all_ranks_of_one_rank_and_of_half_of_them_are_probed() -> None:
    sizes = {result.collective.partition(" on ")[2] for result in results("2x2")}
    assert sizes == {"1 rank", "2 ranks", "4 ranks"}


def sum_for_average(right: Collective, rank: Rank) -> Collective:
    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **more: Any) -> Any:
        return right(tensor, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **more)

    return all_reduce


def first_bucket_only(right: Collective, rank: Rank) -> Collective:
    def all_reduce(tensor: torch.Tensor, **more: Any) -> Any:
        return right(tensor[:262_144], **more)

    return all_reduce


def halved_on_the_last_rank(right: Collective, rank: Rank) -> Collective:
    def reduce_scatter(found: torch.Tensor, values: torch.Tensor, **more: Any) -> None:
        right(found, values, **more)
        if rank.rank == 1 and found.is_floating_point():
            found /= 2

    return reduce_scatter


@pytest.mark.parametrize(
    ("name", "make_wrong", "collective", "detail"),
    [
        (
            "all_reduce",
            sum_for_average,
            "all_reduce avg of 1031 float32 on 2 ranks",
            "rank 0: 2 times the right answer",
        ),
        (
            "all_reduce",
            first_bucket_only,
            "all_reduce sum of 300007 float32 on 2 ranks",
            "rank 0: element 262144 is ",
        ),
        (
            "reduce_scatter_tensor",
            halved_on_the_last_rank,
            "reduce_scatter sum of 1031 float64 on 2 ranks",
            "rank 1: 0.5 times the right answer",
        ),
    ],
)
def test_a_wrong_collective_is_found_and_named(
    name: str,
    make_wrong: Callable[[Collective, Rank], Collective],
    collective: str,
    detail: str,
) -> None:
    probed = results("1x2", probe_with(name, make_wrong))
    wrong = {result.collective: result.detail for result in probed if result.wrong}
    assert wrong[collective].startswith(detail), wrong
    assert {each.split()[0] for each in wrong} == {name.removesuffix("_tensor")}


def no_float16(right: Collective, rank: Rank) -> Collective:
    def all_reduce(tensor: torch.Tensor, **more: Any) -> Any:
        if tensor.dtype is torch.float16:
            raise RuntimeError("float16 is not for me\nand more")
        return right(tensor, **more)

    return all_reduce


def not_on_rank_1(right: Collective, rank: Rank) -> Collective:
    def all_reduce(tensor: torch.Tensor, **more: Any) -> Any:
        right(tensor, **more)
        if rank.rank == 1:
            raise RuntimeError("not here")

    return all_reduce


def test_a_collective_that_the_backend_refuses_is_not_wrong() -> None:
    probed = results("1x2", probe_with("all_reduce", no_float16))
    assert [result for result in probed if result.wrong] == []
    kinds = "all_reduce sum of float16, all_reduce avg of float16"
    assert summarise_refusals(probed) == f"{kinds} (float16 is not for me)"


def test_a_collective_that_only_some_ranks_refuse_is_wrong() -> None:
    probed = results("1x2", probe_with("all_reduce", not_on_rank_1))
    wrong = {result.collective: result.detail for result in probed if result.wrong}
    assert wrong["all_reduce sum of 1031 float64 on 2 ranks"] == "refused on some ranks only"
