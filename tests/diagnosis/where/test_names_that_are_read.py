"""Of what the shown line reads, the report says what it held on the ranks and on one rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_equivalence.diagnosis.setting import PointedLine, Reading
from ddp_equivalence.diagnosis.where.names import SAME, Names, Told
from ddp_equivalence.measurement.calls import CodeLine, Held, NameAt, Value
from tests.diagnosis.where.faulty import CASE, average, unnamed

pytestmark = pytest.mark.self_check


# What is right on the ranks, and what is told of what is not.


def held_by_name() -> None:
    n = 3
    assert n


LINE = inspect.getsourcelines(held_by_name)[1]
READER = CodeLine(__file__, LINE + 2, "held_by_name")
READING = Reading("n", READER)


def of(numbers: Any) -> Value:
    return Value.of(torch.tensor(numbers))


def told(alone: Held, *ranks: Held) -> Told | None:
    """What is told of n; None if nothing is known."""
    at = NameAt(__file__, LINE, "n")
    return Names([{at: (one,)} for one in ranks], {at: (alone,)}).held(READING)


@pytest.mark.parametrize(
    "held",
    [
        (3, 3, 3),
        ("mean", "mean", "mean"),
        (0.1 + 0.2, 0.3, 0.3),
        (1, 2, 2),  # the number of ranks
        ((("kl", 0.5), ("fit", 1)), (("kl", 0.5), ("fit", 1)), (("kl", 0.5), ("fit", 1))),
    ],
)
def test_what_all_ranks_hold_as_one_rank_does_is_right(held: tuple[Held, ...]) -> None:
    assert told(*held) == SAME


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ((8, 3, 5), "n is 3 on rank 0, 5 on rank 1, and 8 on one rank"),
        ((of(9), of(4), of(4)), "n is 4 on every rank, and 9 on one rank"),
        (
            ((("kl", 0.5),), (("kl", 0.5),), (("kl", 0.0),)),
            "n[kl] is 0.5 on rank 0, 0 on rank 1, and 0.5 on one rank",
        ),
        ((of(4), of(3), of(5)), "n is 3 on rank 0, 5 on rank 1, and 4 on one rank"),
        ((True, True, False), "n is 1 on rank 0, 0 on rank 1, and 1 on one rank"),
    ],
)
def test_numbers_that_are_not_those_of_one_rank_are_told(held: tuple[Held, ...], text: str) -> None:
    assert told(*held) == Told(text, "other")


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ((of([1.0, 2.0, 3.0]), of([1.0]), of([2.0, 3.0])), "n is each rank's own part"),
        ((of(1.5), of(1.0), of(2.0)), "n is 1 on rank 0, 2 on rank 1, and 1.5 on one rank"),
        ((of(8), of(4), of(4)), "n is 4 on every rank, and 8 on one rank"),
    ],
)
def test_parts_of_what_one_rank_holds_are_told_as_such(held: tuple[Held, ...], text: str) -> None:
    assert told(*held) == Told(text, "part")


@pytest.mark.parametrize(
    "held",
    [
        (..., ..., ...),
        (of([1.0, 2.0]), of([1.0]), of([3.0])),
        (of([1.0, 2.0]), of([2.0]), of([1.0])),
        ((("a", 1),), (("b", 1),), (("b", 1),)),
        ("mean", "sum", "mean"),
    ],
)
def test_nothing_is_told_of_what_is_not_known_or_no_number(held: tuple[Held, ...]) -> None:
    assert told(*held) is None


def test_a_name_that_was_held_another_number_of_times_is_not_known() -> None:
    at = NameAt(__file__, LINE, "n")
    names = Names([{at: (3, 3)}, {at: (3, 3)}], {at: (3,)})
    assert names.held(READING) is None
    assert Names([{}, {}], {at: (3,)}).held(READING) is None


def test_a_part_of_a_rank_is_right_unless_it_is_passed_on() -> None:
    at = NameAt(__file__, LINE, "n")
    names = Names([{at: (of([1.0]),)}, {at: (of([2.0]),)}], {at: (of([1.0, 2.0]),)})
    assert names.is_right(READING)
    assert not names.is_right(replace(READING, passed=True))


def set_again() -> None:
    n = torch.tensor(3)
    n = n + 1
    n.add_(1)
    print(int(n))


def test_what_a_later_line_sets_again_is_not_told_of_the_first() -> None:
    begins = inspect.getsourcelines(set_again)[1]
    at = NameAt(__file__, begins, "n")
    names = Names([{at: (4,)}, {at: (5,)}], {at: (8,)})
    reads = Reading("n", CodeLine(__file__, begins + 4, "set_again"))
    lines = [
        PointedLine(CodeLine(__file__, begins + n, "set_again"), "sets n", reads=reads)
        for n in (1, 2, 4)
    ]
    first, second, last = (one.note for one in names.told(lines))
    assert first == second == "sets n"
    assert last == "n is 4 on rank 0, 5 on rank 1, and 8 on one rank"


# Whole steps.


def ratio(model: Any, batch: Any) -> Any:
    positive = (batch["targets"] > 0).float()
    return weighted(model(batch["rows"]), batch["targets"], weight_of(positive, positive.sum()))


def weight_of(positive: Tensor, count: Tensor) -> Tensor:
    return (positive.numel() - count) / count


def weighted(outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    return ((outputs - targets).square() * (1 + weight * (targets > 0))).mean()


def own_count(model: Any, shard: Any, rank: Any) -> None:
    positive = (shard["targets"] > 0).float()
    count = positive.sum()
    weight = (positive.numel() - count) / count.clamp(min=1)
    weighted(model(shard["rows"]), shard["targets"], weight).backward()
    average(model)


class Terms:
    """A loss of two terms, with the weights of a rank."""

    def __init__(self, rank: int) -> None:
        self.scale = 2.0
        self.weights = {"fit": 1.0, "size": 0.5 if rank == 0 else 0.0}

    def loss(self, model: Any, shard: Any) -> Any:
        outputs = model(shard["rows"])
        fit, size = (outputs - shard["targets"]).square().mean(), outputs.square().mean()
        return self.scale * (self.weights["fit"] * fit + self.weights["size"] * size)


def two_terms(model: Any, batch: Any) -> Any:
    return Terms(0).loss(model, batch)


def weights_of_the_rank(model: Any, shard: Any, rank: Any) -> None:
    Terms(rank.rank).loss(model, shard).backward()
    average(model)


def notes_of(step: Callable[..., Any], loss: Callable[..., Any]) -> dict[str, str]:
    """The shown lines with their notes."""
    where = unnamed(replace(CASE, loss=loss), step)
    file = inspect.getsourcefile(step) or ""
    with open(file, encoding="utf-8") as source:
        text = source.read().splitlines()
    return {text[one.line.number - 1].strip(): one.note for one in where.lines}


def test_the_own_count_of_each_rank_is_told_beside_that_of_one_rank() -> None:
    notes = notes_of(own_count, ratio)
    told = [note for note in notes.values() if note.startswith("count is ")]
    assert len(told) == 1, notes
    assert "on rank 0" in told[0]
    assert told[0].endswith("on one rank")


def test_a_setting_that_one_rank_has_not_is_told_and_one_that_all_have_is_not() -> None:
    notes = notes_of(weights_of_the_rank, two_terms)
    what = "self.weights[size] is 0.5 on rank 0, 0 on ranks 1, 2 and 3, and 0.5 on one rank"
    assert what in notes.values(), notes
    assert not any("scale" in note for note in notes.values()), notes
