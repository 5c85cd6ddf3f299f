"""What rows are padded with is seen in the batches, or is known to be a guess."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ddp_equivalence.observed_scripts.rows import Padding, guessed_paddings, padding_of, rows_of


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
