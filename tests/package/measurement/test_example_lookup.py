"""Rows of the big batch are recognised in whatever a model is called with, and never guessed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ddp_equivalence.measurement.example_lookup import ExampleLookup

READ = (3, 9, 1, 12, 4)

Batch = dict[str, Tensor]


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return {
        "image": torch.randint(0, 256, (16, 3, 8, 8), generator=generator, dtype=torch.uint8),
        "ids": torch.randint(0, 50, (16, 7), generator=generator),
        "rows": torch.randn(16, 5, generator=generator),
        "labels": torch.randint(0, 10, (16,), generator=generator),
    }


MEAN, STD = torch.tensor([100.0, 110.0, 120.0]), torch.tensor([50.0, 60.0, 70.0])

RECOGNISED: dict[str, Callable[[Batch], Tensor]] = {
    "as it is": lambda one: one["rows"],
    "input tokens": lambda one: one["ids"][:, :-1],
    "target tokens": lambda one: one["ids"][:, 1:],
    "pixels between 0 and 1": lambda one: one["image"].float() / 255,
    "flattened": lambda one: one["image"].flatten(1),
    "floats": lambda one: one["image"].float(),
    "normalised by numbers": lambda one: (one["image"].float() - 127) / 63.5,
    "normalised by channel": lambda one: (
        (one["image"].float() - MEAN[:, None, None]) / STD[:, None, None]
    ),
    "normalised by its own statistics": lambda one: (
        (one["rows"] - one["rows"].mean(0)) / one["rows"].std(0)
    ),
    "channels last": lambda one: one["image"].permute(0, 2, 3, 1),
    "in the memory format channels_last": lambda one: one["image"].contiguous(
        memory_format=torch.channels_last
    ),
    "halves": lambda one: one["rows"].half(),
    "doubles": lambda one: one["rows"].double(),
    "examples along dim 1": lambda one: one["ids"].t(),
    "a crop": lambda one: one["image"][:, :, 2:6, :].float(),
    "one channel": lambda one: one["image"][:, 1],
    "with other columns": lambda one: torch.cat([one["rows"], torch.ones(5, 2)], 1),
}

NOT_RECOGNISED: dict[str, Callable[[Batch], Tensor]] = {
    "noise": lambda one: torch.randn(5, 5),
    "zeros": lambda one: torch.zeros(5, 5),
    "a grid": lambda one: torch.linspace(0, 1, 5)[:, None],
    "positions": lambda one: torch.arange(5),
    "a mask": lambda one: torch.ones(5, 7, dtype=torch.long),
    "each row normalised by itself": lambda one: F.layer_norm(one["rows"], (5,)),
    "tokens one by one": lambda one: one["ids"].reshape(-1, 1),
    "two rows joined": lambda one: torch.cat([one["rows"], one["rows"].flip(0)], 1),
    "another tensor of the same shape": lambda one: torch.randint(0, 50, (5, 7)),
    "a scalar": lambda one: one["rows"].sum(),
}


@pytest.mark.parametrize("change", RECOGNISED)
def test_rows_are_recognised(change: str, batch: Batch) -> None:
    copied = {name: tensor[list(READ)] for name, tensor in batch.items()}
    rows = ExampleLookup(batch).rows_of((RECOGNISED[change](copied),))
    assert rows is not None
    assert rows.candidates == tuple((position,) for position in READ)


@pytest.mark.parametrize("change", NOT_RECOGNISED)
def test_other_tensors_are_not_recognised(change: str, batch: Batch) -> None:
    copied = {name: tensor[list(READ)] for name, tensor in batch.items()}
    assert ExampleLookup(batch).rows_of((NOT_RECOGNISED[change](copied),)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_little_precision_are_recognised_after_an_affine_change(dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (16, 64), dtype=torch.uint8)
    rows = ExampleLookup(images).rows_of(images[list(READ)].to(dtype) / 255)
    assert rows is not None
    assert rows.candidates == tuple((position,) for position in READ)


def test_positions_are_not_taken_for_a_leaf_that_numbers_the_examples() -> None:
    batch = {"index": torch.arange(16), "rows": torch.randn(16, 3)}
    assert ExampleLookup(batch).rows_of(torch.arange(8)) is None


def test_few_flags_that_fit_rows_by_chance_are_not_recognised() -> None:
    flags = torch.cartesian_prod(*[torch.arange(2)] * 4).double()
    assert ExampleLookup(flags).rows_of(2 * flags[[3, 5, 6, 9]] - 1) is None


def test_equal_rows_keep_all_their_positions() -> None:
    batch = torch.randn(8, 5)
    batch[6] = batch[2].clone()
    rows = ExampleLookup(batch).rows_of(batch[[1, 2, 3]])
    assert rows is not None
    assert rows.candidates == ((1,), (2, 6), (3,))
    assert not rows.is_certain


def test_a_window_that_is_in_two_rows_keeps_both() -> None:
    """Rows of a sliding window: what is left of one row without its end begins the next."""
    series = torch.randn(20)
    batch = series.unfold(0, 6, 1)
    rows = ExampleLookup(batch).rows_of(batch[3:6, 1:].clone())
    assert rows is not None
    assert rows.candidates == ((3, 4), (4, 5), (5, 6))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda given: given,
    "a part of its rows": lambda given: given[1:3],
    "a part of each row": lambda given: given[1:3, 1:],
    "one column": lambda given: given[1:3, 2],
    "another shape": lambda given: given[1:3].view(2, 3, 2),
    "examples along dim 1": lambda given: given[1:3].t(),
    "values one by one": lambda given: given[1:3].view(-1, 1),
}


def positions(rows: Tensor, batch: Batch) -> list[int]:
    """The positions of rows that are certain."""
    found = ExampleLookup(batch).rows_of(rows)
    assert found is not None
    return [position for (position,) in found.candidates]


def test_a_prompt_with_either_answer_in_one_call_is_read_once(batch: Batch) -> None:
    prompts = batch["ids"][list(READ)]
    ends = [torch.full((5, 2), end) for end in (60, 61)]
    both = torch.cat([torch.cat([prompts, end], 1) for end in ends])
    assert positions(both, batch) == list(READ)


def test_equal_prompts_with_one_answer_each_are_all_read() -> None:
    prompts = torch.arange(24).reshape(8, 3) // 6 * 6  # two examples in a row have equal prompts
    found = ExampleLookup(prompts).rows_of(torch.cat([prompts[:4], torch.arange(4)[:, None]], 1))
    assert found is not None
    assert found.candidates == ((0, 1), (0, 1), (2, 3), (2, 3))


@pytest.mark.parametrize("again", [READ, (3,)], ids=["all", "one"])
def test_equal_rows_in_one_call_are_read_again(again: tuple[int, ...], batch: Batch) -> None:
    read = [*READ, *again]
    assert positions(batch["rows"][read].half(), batch) == read


def test_an_example_that_alone_has_two_forms_is_read_twice(batch: Batch) -> None:
    ids = batch["ids"][[*READ, 3]]
    ends = torch.tensor([60] * 5 + [61])[:, None]
    assert positions(torch.cat([ids, ends], 1), batch) == [*READ, 3]


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_what_the_rank_was_given_are_certain_even_among_equal_rows(view: str) -> None:
    batch = torch.ones(8, 6)
    given = batch[4:8].clone()
    rows = ExampleLookup(batch, [(given, (4, 5, 6, 7))]).rows_of(VIEWS[view](given))
    expected = (4, 5, 6, 7) if view == "itself" else (5, 6)
    assert rows is not None
    assert rows.candidates == tuple((position,) for position in expected)


def test_memory_says_nothing_once_the_step_has_written_into_it() -> None:
    batch = torch.randn(8, 6)
    given = batch[4:8].clone()
    lookup = ExampleLookup(batch, [(given, (4, 5, 6, 7))])
    given.copy_(given[[3, 2, 1, 0]])
    rows = lookup.rows_of(given)
    assert rows is not None
    assert rows.candidates == ((7,), (6,), (5,), (4,))


def test_a_tensor_that_spans_rows_is_not_taken_for_rows() -> None:
    given = torch.randn(4, 6)
    assert ExampleLookup(given, [(given, (0, 1, 2, 3))]).rows_of(given.view(2, 12)) is None


def test_two_arguments_with_other_rows_are_read_together(batch: Batch) -> None:
    rows = ExampleLookup(batch).rows_of((batch["rows"][:4], batch["rows"][4:8]))
    assert rows is not None
    assert rows.candidates == tuple((position,) for position in range(8))


def test_only_examples_that_are_equal_in_every_tensor_are_equal() -> None:
    rows, labels = torch.zeros(4, 3), torch.tensor([0, 1, 1, 2])
    assert ExampleLookup({"rows": rows, "labels": labels}).equal_examples() == ((1, 2),)
