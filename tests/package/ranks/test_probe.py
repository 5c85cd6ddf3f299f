"""Collectives that answer wrongly are found and named before anybody blames a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_equivalence import Rank
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks import probe as collective_probe
from ddp_equivalence.ranks import probe_on_rank
from ddp_equivalence.ranks.lanes import choose
from ddp_equivalence.ranks.probe import Answer, ask, probe, refused_in_short
from ddp_equivalence.ranks.warm_ranks import warm_ranks

Work = Callable[[Rank, object], Iterator[object]]
Collective = Callable[..., Any]


def with_another(name: str, make: Callable[[Collective, Rank], Collective]) -> Work:
    """The questions, asked of ranks on which ``dist.<name>`` is another function."""

    def work(rank: Rank, payload: object) -> Iterator[object]:
        right = getattr(dist, name)
        setattr(dist, name, make(right, rank))
        try:
            yield from probe_on_rank.run(rank, payload)
        finally:
            setattr(dist, name, right)

    return work


def asked(layout: str, work: Work = probe_on_rank.run) -> tuple[Answer, ...]:
    parsed = parse(layout)
    with warm_ranks().acquire(parsed, choose(parsed, "gloo"), 15.0) as ranks:
        return ask(ranks, work=work)


@pytest.mark.parametrize("layout", ["1x1", "1x2", "1+2"])
def test_the_collectives_of_this_torch_answer_right(layout: str) -> None:
    answers = asked(layout)
    assert [one for one in answers if one.wrong] == []
    assert {"all_reduce", "reduce_scatter", "all_gather", "broadcast"} == {
        one.what.split()[0] for one in answers if one.right
    }


def test_the_groups_asked_are_all_ranks_one_rank_and_half_of_them() -> None:
    sizes = {one.what.partition(" on ")[2] for one in asked("2x2")}
    assert sizes == {"1 rank", "2 ranks", "4 ranks"}


def sum_for_average(right: Collective, rank: Rank) -> Collective:
    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **more: Any) -> Any:
        return right(tensor, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **more)

    return all_reduce


def first_bucket_only(right: Collective, rank: Rank) -> Collective:
    def all_reduce(tensor: torch.Tensor, **more: Any) -> Any:
        return right(tensor[:262_144], **more)

    return all_reduce


def own_value_kept(right: Collective, rank: Rank) -> Collective:
    def broadcast(tensor: torch.Tensor, **more: Any) -> Any:
        return right(tensor.clone(), **more)

    return broadcast


def in_another_order(right: Collective, rank: Rank) -> Collective:
    def all_gather(found: list[torch.Tensor], tensor: torch.Tensor, **more: Any) -> Any:
        return right(found[::-1], tensor, **more)

    return all_gather


def halved_on_the_last_rank(right: Collective, rank: Rank) -> Collective:
    def reduce_scatter(found: torch.Tensor, values: torch.Tensor, **more: Any) -> None:
        right(found, values, **more)
        if rank.rank == 1 and found.is_floating_point():
            found /= 2

    return reduce_scatter


@pytest.mark.parametrize(
    ("name", "make", "what", "detail"),
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
            "broadcast",
            own_value_kept,
            "broadcast of 1031 bfloat16 on 2 ranks",
            "rank 0: element 0 is -3, not -1",
        ),
        (
            "all_gather",
            in_another_order,
            "all_gather of 1031 int64 on 2 ranks",
            "rank 0: element 0 is -1, not -3",
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
    name: str, make: Callable[[Collective, Rank], Collective], what: str, detail: str
) -> None:
    wrong = {one.what: one.detail for one in asked("1x2", with_another(name, make)) if one.wrong}
    assert wrong[what].startswith(detail), wrong
    assert {one.split()[0] for one in wrong} == {name.removesuffix("_tensor")}


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


def test_what_a_backend_refuses_is_not_wrong() -> None:
    answers = asked("1x2", with_another("all_reduce", no_float16))
    assert [one for one in answers if one.wrong] == []
    kinds = "all_reduce sum of float16, all_reduce avg of float16"
    assert refused_in_short(answers) == f"{kinds} (float16 is not for me)"


def test_what_only_some_ranks_refuse_is_wrong() -> None:
    answers = asked("1x2", with_another("all_reduce", not_on_rank_1))
    wrong = {one.what: one.detail for one in answers if one.wrong}
    assert wrong["all_reduce sum of 1031 float64 on 2 ranks"] == "refused on some ranks only"


def test_a_lane_is_asked_once_for_each_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[object] = []

    def count(ranks: Any) -> tuple[Answer, ...]:
        asked_for.append(ranks.layout.name)
        return (Answer("all_reduce", right=True),)

    monkeypatch.setattr(collective_probe, "_known", {})
    monkeypatch.setattr(collective_probe, "ask", count)
    for layout in ("1x2", "2x1", "1x2", "1+2"):
        parsed = parse(layout)
        assert probe(parsed, choose(parsed, "gloo"), 15.0) == (Answer("all_reduce", right=True),)
    assert asked_for == ["1x2", "1+2"]
