"""A setup that cannot be right is refused with the field, its value and what would be right."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.explain import KnownGood, Setup, explain
from ddp_equivalence.commands.explain.explanation import as_data

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"batch": 0}, "batch", "a whole number from 1"),
    ({"batch": -4}, "batch", "a whole number from 1"),
    ({"batch": True}, "batch", "a whole number from 1"),
    ({"batch": 2.5}, "batch", "a whole number from 1"),
    ({"batch": 10**15}, "batch", "a whole number from 1"),
    ({"nodes": 0}, "nodes", "a whole number from 1"),
    ({"ranks_per_node": 0}, "ranks_per_node", "a whole number from 1 to 100000"),
    (
        {"batch": 10**12, "ranks_per_node": 10**12, "parallelism": "data-parallel"},
        "ranks_per_node",
        "a whole number from 1 to 100000",
    ),
    ({"known_good": "16@0.01"}, "known_good", "a KnownGood, such as KnownGood.read('16@0.01')"),
    ({"accumulation": 0}, "accumulation", "a whole number from 1"),
    ({"loss": "median"}, "loss", "one of mean, sum, token-mean"),
    ({"parallelism": "fsdp"}, "parallelism", "one of ddp, data-parallel"),
    ({"optimizer": "lion"}, "optimizer", "one of sgd, adam"),
    ({"parallelism": "data-parallel", "nodes": 2}, "nodes", "nn.DataParallel is one process"),
    (
        {"parallelism": "data-parallel-loss-inside", "nodes": 2},
        "nodes",
        "nn.DataParallel is one process",
    ),
    ({"parallelism": "none", "nodes": 2}, "nodes", "training on one device is one process"),
    ({"parallelism": "none", "ranks_per_node": 2}, "ranks_per_node", "separate trainings"),
    ({"accumulation_divided": True}, "accumulation_divided", "there is no accumulation"),
    ({"accumulation_divided": False}, "accumulation_divided", "there is no accumulation"),
    ({"accumulation": 4}, "accumulation_divided", "divided by 4 (--accumulation-divided) or not"),
    ({"drop_last": True}, "drop_last", "the dataset's size"),
    ({"examples": 0}, "examples", "a whole number from 1"),
    (
        {"examples": 15, "ranks_per_node": 4, "batch": 5, "drop_last": True},
        "batch",
        "at most 4, the examples that each of 4 ranks gets: with a larger batch, drop_last",
    ),
    (
        {"examples": 4, "batch": 5, "drop_last": True},
        "batch",
        "at most 4, the examples that there are: with a larger batch, drop_last",
    ),
]


@pytest.mark.parametrize(("fields", "field", "right"), REFUSED)
def test_a_setup_that_cannot_be_is_refused_by_name(
    fields: dict[str, Any], field: str, right: str
) -> None:
    with pytest.raises(BadCase) as refused:
        Setup(**{"batch": 4} | fields)
    assert refused.value.field == field
    assert refused.value.value == fields.get(field, {"accumulation_divided": None}.get(field))
    assert right in refused.value.right


@pytest.mark.parametrize(
    "text",
    [
        *("", "16", "@", "16@", "@0.01", "0@0.01", "16@0", "16@-1", "16@nan", "16@inf", "16@1/2"),
        *("1@1e308", "1@1.1e30", "1@9e-31"),
        *("16@1_0", "1_6@0.1", "16@0x1", "\u0661@0.1", "16@+0.1"),
        *("16x0.01", "1.5@0.1", "16@0.1@2", "-16@0.1", "16@1e999999999", "16@1e-999999999"),
    ],
)
def test_a_malformed_known_good_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadCase) as refused:
        KnownGood.read(text)
    assert (refused.value.field, refused.value.value) == ("known_good", text)
    assert "such as 16@0.01" in refused.value.right


@pytest.mark.parametrize(
    ("text", "rate"), [("16@0.01", "1/100"), ("16@1e-3", "1/1000"), ("1@3", "3"), ("8@.5", "1/2")]
)
def test_a_known_good_is_read_exactly(text: str, rate: str) -> None:
    assert KnownGood.read(text).learning_rate == Fraction(rate)


@pytest.mark.parametrize(
    "rate", [0.01, Fraction(0), Fraction(-1, 2), "0.01", Fraction(10**31), Fraction(1, 10**31)]
)
def test_a_known_rate_that_is_no_positive_fraction_within_bounds_is_refused(rate: Any) -> None:
    with pytest.raises(BadCase, match="known_good"):
        KnownGood(16, rate)


def test_a_known_loss_that_is_neither_is_refused() -> None:
    with pytest.raises(BadCase, match="known_loss = 'max': one of mean, sum"):
        KnownGood(16, Fraction(1), "max")  # type: ignore[arg-type]


def test_a_known_sum_over_tokens_is_refused_as_their_number_is_not_given() -> None:
    known = KnownGood.read("64@0.1", loss="sum")
    assert Setup(batch=4, loss="sum", known_good=known).known_good == known
    with pytest.raises(BadCase) as refused:
        Setup(batch=4, loss="token-mean", known_good=known)
    assert (refused.value.field, refused.value.value) == ("known_loss", "sum")
    assert "Multiply that learning rate by the number of tokens of its batch" in refused.value.right


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("known", ["1@1e30", "1000000000000@1e-30"])
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_the_largest_and_smallest_that_are_not_refused_are_explained(
    known: str, loss: Any, optimizer: Any
) -> None:
    setup = Setup(
        batch=10**12,
        nodes=10**12,
        ranks_per_node=10**5,
        accumulation=10**12,
        accumulation_divided=False,
        parallelism="all-reduce-sum",
        known_good=KnownGood.read(known, loss),
        optimizer=optimizer,
        examples=10**12,
    )
    found = explain(setup)
    assert "every rank holds" in str(found)
    assert as_data(found)["factor"] == 1e29
