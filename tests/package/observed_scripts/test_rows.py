"""Batches of ranks are taken apart and joined as one process would have read them."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch

from ddp_equivalence.observed_scripts.record import Piece, Row, pieces_of
from ddp_equivalence.observed_scripts.rows import (
    TOP_OF_CALL,
    joined,
    put_into,
    rows_of,
)


def test_rows_of_ranks_are_joined_in_the_containers_of_the_script() -> None:
    ranks: list[Any] = [
        UserDict(x=torch.full((2, 3), float(rank)), y=torch.arange(2) + 10 * rank, scale=0.5)
        for rank in range(2)
    ]
    rows = joined([(rows_of(batch), None) for batch in ranks])
    native = UserDict(x=torch.zeros(2, 3), y=torch.zeros(2, dtype=torch.long), scale=0.5)
    batch = put_into(rows, native)
    assert type(batch) is UserDict
    assert batch["x"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert batch["y"].tolist() == [0, 1, 10, 11]
    assert batch["scale"] == 0.5
    assert rows.count == 4


def test_some_rows_are_taken_in_their_order() -> None:
    rows = rows_of([torch.arange(4), ["a", "b", "c", "d"]])
    some = joined([(rows, (2, 0)), (rows, (3,))])
    batch = put_into(some, [torch.zeros(4), list("wxyz")])
    assert batch[0].tolist() == [2, 0, 3]
    assert batch[1] == ["c", "a", "d"]


def test_a_tensor_without_rows_is_carried_whole() -> None:
    rows = rows_of({"x": torch.ones(4, 2), "y": torch.ones(4), "mask": torch.ones(3, 3)})
    both = joined([(rows, None), (rows, None)])
    assert both.tensors["['x']"].shape == (8, 2)
    assert both.tensors["['mask']"].shape == (3, 3)


def test_rows_of_other_lengths_are_padded_as_the_batch_is() -> None:
    short = {
        "input_ids": torch.tensor([[5, 6], [7, 1]]),
        "attention_mask": torch.tensor([[1, 1], [1, 0]]),
        "labels": torch.tensor([[5, 6], [7, -100]]),
    }
    long = {name: torch.ones(1, 3, dtype=torch.long) for name in short}
    rows = joined([(rows_of(short), None), (rows_of(long), None)])
    assert rows.tensors["['input_ids']"].tolist() == [[5, 6, 1], [7, 1, 1], [1, 1, 1]]
    assert rows.tensors["['attention_mask']"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert rows.tensors["['labels']"].tolist() == [[5, 6, -100], [7, -100, -100], [1, 1, 1]]


def detections(*boxes: int, channels: int = 3) -> tuple[list[Any], tuple[Any, ...]]:
    """Images of several sizes, each with its own number of boxes."""
    images = [torch.full((channels, 2 + number, 4), float(number)) for number in boxes]
    targets = tuple({"boxes": torch.full((n, 4), float(n)), "name": f"has {n}"} for n in boxes)
    return images, targets


def test_the_entries_of_lists_of_rows_are_joined() -> None:
    parts = [rows_of(detections(1, 2)), rows_of(detections(4, 3, 5))]
    assert [rows.count for rows in parts] == [2, 3]
    rows = joined([(parts[0], None), (parts[1], (2, 0))])
    images, targets = put_into(rows, detections(7, 8))
    assert (type(images), type(targets), rows.count) == (list, tuple, 4)
    assert [image.shape[1] - 2 for image in images] == [1, 2, 5, 4]
    assert [target["name"] for target in targets] == ["has 1", "has 2", "has 5", "has 4"]
    assert [len(target["boxes"]) for target in targets] == [1, 2, 5, 4]


def test_what_is_kept_of_rows_are_their_tensors_and_plain_values() -> None:
    images, targets = detections(1, 2)
    for target in targets:
        target["maker"] = object()
    kept = rows_of((images, targets)).changed(torch.clone)
    assert kept.entries["[1]"][0].keys() == {"['boxes']", "['name']"}


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param([[torch.ones(4, 3, 8, 8), torch.ones(4, 3, 2, 2)]], id="crops"),
        pytest.param([[torch.ones(4, 3)] * 4, torch.ones(4)], id="as many crops as rows"),
        pytest.param([[torch.ones(8, 3)] * 2, [torch.ones(8, 2)] * 2], id="two lists of views"),
        pytest.param([(torch.ones(4, 3), torch.ones(4, dtype=torch.long))], id="nested"),
        pytest.param([torch.ones(2, 3), torch.ones(2, 3)], id="two tensors"),
        pytest.param([(torch.ones(9, 3), torch.ones(2, 20).long()), torch.ones(4)], id="a graph"),
        pytest.param(
            {"x": [torch.ones(4, 2), torch.ones(6, 2)], "y": [torch.ones(4), torch.ones(6)]},
            id="two tasks",
        ),
        pytest.param({"views": [torch.ones(8, 3)] * 2, "size": (224, 224)}, id="views and a size"),
        pytest.param(
            {"frames": [torch.ones(8, 3)] * 5, "times": torch.arange(5)}, id="frames and times"
        ),
        pytest.param([{"x": torch.ones(4, 2)}, {"x": torch.ones(4, 3)}], id="dicts of views"),
    ],
)
def test_lists_of_whole_tensors_are_no_lists_of_rows(batch: Any) -> None:
    assert rows_of(batch).entries == {}


def test_a_batch_may_be_a_list_of_its_rows() -> None:
    batch = [{"image": torch.ones(3, 5 + n, 7), "boxes": torch.ones(n, 4)} for n in (5, 2)]
    rows = rows_of(batch)
    assert (rows.count, list(rows.entries)) == (2, [""])
    assert [len(one["boxes"]) for one in put_into(joined([(rows, (1,))]), batch)] == [2]


@pytest.mark.parametrize("of_call", [([0], {}), ([0, 1], {}), ([0], {"targets": 1})])
def test_the_arguments_of_a_call_are_no_list_of_rows(of_call: Any) -> None:
    batch = detections(1, 2, 4, 3)
    places, named = of_call
    arguments = (tuple(batch[n] for n in places), {name: batch[n] for name, n in named.items()})
    rows = rows_of(arguments, TOP_OF_CALL)
    assert rows.entries.keys() <= {"[0][0]", "[0][1]", "[1]['targets']"}
    assert len(rows.entries) == (2 if len(places) + len(named) == 2 else 0)


def test_ranks_that_hold_other_lists_of_rows_are_not_joined() -> None:
    listed, whole = rows_of(detections(1, 2)), rows_of(([torch.ones(3, 2, 4)] * 2, ({}, {})))
    with pytest.raises(ValueError, match="lists of rows at other places"):
        joined([(listed, None), (whole, None)])
    with pytest.raises(ValueError, match="lists of rows at other places"):
        put_into(listed, ([torch.ones(3, 2, 4)] * 2, ({}, {})))


def test_rows_with_other_parts_than_those_of_the_one_process_are_not_put_into_its_batch() -> None:
    images, targets = detections(1, 2)
    for target in targets:
        target["more"] = 1
    with pytest.raises(ValueError, match=r"other parts: \['more'\]"):
        put_into(rows_of((images, targets)), detections(3, 4))


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        pytest.param(
            {"x": torch.ones(4, 2), "edges": torch.ones(2, 9)},
            {"x": torch.ones(4, 2), "edges": torch.zeros(2, 9)},
            r"\['edges'\] has no rows, and differs between ranks",
            id="edges of two graphs",
        ),
        pytest.param(
            {"x": torch.ones(4, 2), "edges": torch.ones(7)},
            {"x": torch.ones(4, 2), "edges": torch.ones(9)},
            r"\['edges'\] has no rows, and differs between ranks",
            id="as many edges as a graph has",
        ),
        pytest.param(
            {"x": torch.ones(2, 3)},
            {"x": torch.ones(2, 3, 4)},
            "number of dimensions",
            id="another number of dimensions",
        ),
    ],
)
def test_what_one_process_would_have_must_be_known(first: Any, second: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        joined([(rows_of(first), None), (rows_of(second), None)])


def test_weights_of_classes_are_not_taken_for_rows() -> None:
    batch = {"x": torch.ones(2, 3), "y": torch.tensor([2, 3]), "weights": torch.rand(5)}
    rows = rows_of(batch)
    assert torch.equal(joined([(rows, (1,))]).tensors["['weights']"], batch["weights"])


# --- which of them one process is asked for

COUNTS = {(0, 0): 3, (1, 0): 2}


def test_whole_micro_batches_are_asked_for_whole() -> None:
    rows = [Row(0, 0, 0), Row(0, 0, 1), Row(0, 0, 2), Row(1, 0, 0), Row(1, 0, 1)]
    assert pieces_of(rows, COUNTS) == (Piece(0, 0), Piece(1, 0))
    assert pieces_of(rows[1:4], COUNTS) == (Piece(0, 0, (1, 2)), Piece(1, 0, (0,)))
    assert pieces_of(rows[::-1], COUNTS) == (Piece(1, 0, (1, 0)), Piece(0, 0, (2, 1, 0)))
    assert pieces_of([Row(1, 0, None)], COUNTS) == (Piece(1, 0),)
