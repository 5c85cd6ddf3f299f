"""Batches of sequences whose dim 0 is the time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddp_equivalence.observed_scripts.rows import joined, put_into, rows_of, with_rows_first


def test_sequences_of_ranks_are_joined_side_by_side() -> None:
    ranks = [
        (torch.full((5, 2), rank), torch.full((3, 2, 4), rank), torch.full((2, 5), rank > 0))
        for rank in (0, 1)
    ]
    parts = [with_rows_first(rows_of(batch)) for batch in ranks]
    assert [rows.count for rows in parts] == [2, 2]
    source, target, mask = put_into(joined([(one, None) for one in parts]), ranks[0])
    assert source.tolist() == [[0, 0, 1, 1]] * 5
    assert target.shape == (3, 4, 4)
    assert target[:, :, 0].tolist() == [[0, 0, 1, 1]] * 3
    assert mask.tolist() == [[False] * 5] * 2 + [[True] * 5] * 2
    assert all(one.is_contiguous() for one in (source, target, mask))


def test_some_sequences_are_taken_in_their_order() -> None:
    words = torch.arange(12).reshape(3, 4)
    rows = with_rows_first(rows_of([words]))
    (taken,) = put_into(joined([(rows, (3, 0))]), [words])
    assert torch.equal(taken, words[:, [3, 0]])


def test_shorter_sequences_are_padded_at_their_end() -> None:
    long, short = torch.ones(5, 2), torch.ones(3, 2)
    long[4, 1] = 0  # so that it is seen with what they are padded
    rows = [with_rows_first(rows_of([one])) for one in (long, short)]
    (batch,) = put_into(joined([(one, None) for one in rows]), [long])
    assert torch.equal(batch, torch.tensor([[1, 1, 1, 1]] * 3 + [[1, 1, 0, 0], [1, 0, 0, 0.0]]))


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param([torch.ones(4, 3, 8, 8), torch.ones(4)], id="images and labels"),
        pytest.param([torch.ones(4)], id="one dimension"),
        pytest.param([torch.ones(4, 6), ["a", "b", "c", "d"]], id="texts beside them"),
        pytest.param([torch.tensor(1.0)], id="no dimension"),
    ],
)
def test_what_has_its_rows_in_dim_0_alone_stays_as_it_is(batch: Any) -> None:
    rows = rows_of(batch)
    assert with_rows_first(rows) is rows


def test_ranks_that_have_their_rows_in_other_dimensions_are_not_joined() -> None:
    words = torch.ones(3, 4)
    with pytest.raises(ValueError, match="ranks have their rows in other dimensions"):
        joined([(rows_of([words]), None), (with_rows_first(rows_of([words])), None)])
