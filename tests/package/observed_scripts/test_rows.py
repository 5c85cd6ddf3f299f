"""Batches of ranks are taken apart and joined as one process would have read them."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ddp_equivalence.observed_scripts.record import Piece, Row, pieces_of
from ddp_equivalence.observed_scripts.rows import (
    TOP_OF_CALL,
    Padding,
    guessed_paddings,
    joined,
    padding_of,
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

COUNTS = [[3], [2]]


def test_whole_micro_batches_are_asked_for_whole() -> None:
    rows = [Row(0, 0, 0), Row(0, 0, 1), Row(0, 0, 2), Row(1, 0, 0), Row(1, 0, 1)]
    assert pieces_of(rows, COUNTS) == (Piece(0, 0), Piece(1, 0))
    assert pieces_of(rows[1:4], COUNTS) == (Piece(0, 0, (1, 2)), Piece(1, 0, (0,)))
    assert pieces_of(rows[::-1], COUNTS) == (Piece(1, 0, (1, 0)), Piece(0, 0, (2, 1, 0)))
    assert pieces_of([Row(1, 0, None)], COUNTS) == (Piece(1, 0),)


# --- what rows are padded with is seen in the batches, or is known to be a guess


def padded(*lengths: int, value: float = 0, left: bool = False, first: int = 5) -> Tensor:
    """Rows of so many numbers, which begin with ``first``, as a collator pads them."""
    rows = [torch.arange(first, first + length) for length in lengths]
    return pad_sequence(
        rows, batch_first=True, padding_value=value, padding_side="left" if left else "right"
    )


@pytest.mark.parametrize("value", [0, 3, -1, -100])
@pytest.mark.parametrize("left", [False, True])
def test_what_rows_end_or_begin_with_is_the_padding(value: int, left: bool) -> None:
    parts = [{"x": padded(*lengths, value=value, left=left)} for lengths in ((7, 4, 3), (9, 2))]
    assert padding_of("x", parts) == Padding(value, is_seen=True)


def test_a_label_that_is_ignored_is_the_padding_wherever_it_stands() -> None:
    masked = torch.tensor([[7, -100, -100, 8, 9], [-100, 2, -100, 5, 6]])
    assert padding_of("targets", [{"targets": masked}]) == Padding(-100, is_seen=True)


def test_a_mask_says_what_the_padding_is() -> None:
    part = {"ids": padded(2, 3, value=1, first=1), "attention_mask": padded(2, 3, first=1).bool()}
    assert padding_of("ids", [part]) == Padding(1, is_seen=True)
    assert padding_of("attention_mask", [part]).value == 0
    is_padding = {"padding_mask": torch.arange(3).expand(2, -1) >= 2}
    assert padding_of("padding_mask", [is_padding]) == Padding(1, is_seen=True)


@pytest.mark.parametrize(("path", "value"), [("labels", -100), ("targets", -100), ("x", 0)])
def test_rows_of_one_length_do_not_show_it(path: str, value: int) -> None:
    """Neither does a token with which every row begins, nor one with which every row ends."""
    parts = [{path: padded(4, 4)}, {path: padded(6, 6)}]
    assert padding_of(path, parts) == Padding(value, is_seen=False)


def test_a_guess_is_one_only_where_ranks_have_rows_of_other_lengths() -> None:
    batches = ({"x": padded(4, 4), "y": torch.ones(2)}, {"x": padded(6, 6), "y": torch.ones(2)})
    assert guessed_paddings([rows_of(one) for one in batches]) == ["['x']"]
    assert guessed_paddings([rows_of(batches[0])] * 2) == []
    shown = ({"x": padded(6, 3, 2)}, {"x": padded(8, 4, 3)})
    assert guessed_paddings([rows_of(one) for one in shown]) == []


@pytest.mark.parametrize(
    "rows",
    [
        [[[1, 2, 0, 0]], [[1, 2, 0, 1, 0, 0]]],
        [[[0, 0, 2, 1]], [[0, 0, 1, 2, 1]]],
        [[[1, 0, 0, 0], [2, 0, 1, 0]], [[1, 2, 3, 1, 0], [1, 1, 1, 0, 0]]],
    ],
)
def test_a_class_with_which_rows_end_is_not_taken_for_the_padding(rows: list[list[int]]) -> None:
    parts = [{"tags": torch.tensor(one)} for one in rows]
    assert padding_of("tags", parts) == Padding(0, is_seen=False)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.complex64, torch.bool, torch.bfloat16])
def test_every_dtype_can_be_asked_for_its_padding(dtype: torch.dtype) -> None:
    parts = [{"x": torch.ones(2, length).to(dtype)} for length in (3, 5)]
    assert padding_of("x", parts) == Padding(0, is_seen=False)


def test_images_that_are_padded_to_other_widths_show_it() -> None:
    parts = []
    for widths in ((5, 3), (7, 4)):
        images = torch.zeros(2, 3, 4, max(widths))
        for image, width in zip(images, widths, strict=True):
            image[:, :, :width] = torch.rand(3, 4, width) + 1
        parts.append({"images": images})
    assert padding_of("images", parts) == Padding(0.0, is_seen=True)
