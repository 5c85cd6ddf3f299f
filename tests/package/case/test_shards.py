"""Named shards are a partition of the big batch; shards that cannot be are refused."""

from __future__ import annotations

import pytest

from ddp_equivalence import BadCase, Case, check
from ddp_equivalence.case.shards import NAMED_SIZES, split


@pytest.mark.parametrize("name", sorted(NAMED_SIZES))
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_all_named_shards_are_a_partition(name: str, world_size: int) -> None:
    shards = split(name, 5 * world_size, world_size)
    assert len(shards.indices) == world_size
    assert sorted(index for of_rank in shards.indices for index in of_rank) == [
        *range(5 * world_size)
    ]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("equal", (5, 5, 5, 5)),
        ("uneven", (2, 4, 6, 8)),
        ("one_example", (1, 6, 6, 7)),
        ("empty", (7, 7, 6, 0)),
        ("2+3+5+10", (2, 3, 5, 10)),
    ],
)
def test_shards_have_the_sizes_that_their_name_says(name: str, sizes: tuple[int, ...]) -> None:
    assert split(name, 20, 4).sizes == sizes


def test_interleaved_assigns_examples_to_ranks_in_turn() -> None:
    assert split("interleaved", 6, 2).indices == ((0, 2, 4), (1, 3, 5))


def test_own_gives_everyone_the_whole_batch_which_is_no_partition() -> None:
    shards = split("own", 3, 2)
    assert shards.indices == ((0, 1, 2), (0, 1, 2))


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ("5+3+2", "one size for each rank: 2, not 3"),
        ("5", "one size for each rank: 2, not 1"),
        ("5+x", "examples per rank such as"),
        ("-5+15", "examples per rank such as"),
        ("evenly", "one of equal, interleaved"),
        ("", "examples per rank such as"),
    ],
)
def test_shards_that_cannot_be_are_refused_with_what_would_be_right(shards: str, says: str) -> None:
    with pytest.raises(BadCase, match=says) as caught:
        Case(model="mlp", loss="mse_mean", shards=shards)
    assert (caught.value.field, caught.value.value) == ("shards", shards)


def test_shards_that_do_not_add_up_to_the_batch_are_refused() -> None:
    with pytest.raises(BadCase, match="add up to the 10 examples of the batch, not 8"):
        split("5+3", 10, 2)
    with pytest.raises(BadCase, match="the sum of the shards, 8") as caught:
        Case(model="mlp", loss="mse_mean", shards="5+3", examples=10)
    assert caught.value.field == "examples"


def test_equal_shards_need_a_batch_that_divides() -> None:
    case = Case(model="mlp", loss="mse_mean", layout="1x4", examples=10)
    with pytest.raises(BadCase, match="a multiple of the 4 ranks") as caught:
        check(case, "ddp_mean")
    assert caught.value.field == "shards"
