"""Learning rates are as they are worked out by hand, and input that cannot be right is refused."""

from __future__ import annotations

from fractions import Fraction
from math import isclose, sqrt
from typing import Any

import pytest

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.explain import KnownGood, Setup, explain, setup_like


@pytest.mark.parametrize(
    ("fields", "multiple"),
    [
        ({"parallelism": "ddp", "ranks_per_node": 2}, False),
        ({"parallelism": "ddp"}, True),
        ({"parallelism": "ddp", "accumulation": 3, "accumulation_divided": True}, False),
        ({"parallelism": "data-parallel", "ranks_per_node": 2}, True),
        (
            {
                "parallelism": "data-parallel",
                "ranks_per_node": 2,
                "accumulation": 3,
                "accumulation_divided": True,
            },
            False,
        ),
        ({"parallelism": "data-parallel-loss-inside", "ranks_per_node": 2}, False),
        ({"parallelism": "hybrid", "ranks_per_node": 2}, True),
        ({"parallelism": "hybrid", "nodes": 2}, False),
        ({"parallelism": "all-reduce-sum", "nodes": 2}, False),
    ],
)
def test_a_mean_over_tokens_is_a_multiple_only_where_one_loss_sees_all(
    fields: dict[str, Any], multiple: bool
) -> None:
    assert explain(Setup(batch=4, loss="token-mean", **fields)).is_multiple is multiple


RATES: list[tuple[dict[str, Any], tuple[str, str, float]]] = [
    ({"known_good": KnownGood.read("2@0.01")}, ("0.0025", "0.02", 0.0025 * sqrt(8))),
    ({"known_good": KnownGood.read("16@0.001", "sum")}, ("0.004", "0.004", 0.004)),
    (
        {"loss": "sum", "known_good": KnownGood.read("16@0.001", "sum")},
        ("0.001", "0.001", 0.001),
    ),
    ({"optimizer": "adam", "known_good": KnownGood.read("4@0.001")}, ("0.001", "0.004", 0.002)),
]


@pytest.mark.parametrize(("fields", "rates"), RATES)
def test_each_rule_gives_the_rate_worked_out_by_hand(
    fields: dict[str, Any], rates: tuple[str, str, float]
) -> None:
    found = explain(
        Setup(batch=4, ranks_per_node=4, parallelism="all-reduce-sum", **fields)
    ).learning_rates
    assert found is not None
    same_step, linear, root = rates
    assert (found.same_step, found.linear) == (Fraction(same_step), Fraction(linear))
    assert isclose(found.square_root, root)
    assert found.start == (found.square_root if "optimizer" in fields else float(found.linear))


@pytest.mark.parametrize(
    ("batch", "first", "reached"),
    [
        (20, "0.9", True),
        (21, "0.9", False),
        (4000, "0.9", False),
        (2, "0", False),
        (2, "0.49", False),
    ],
)
def test_the_root_rule_for_adam_is_for_betas_that_average_two_gradients(
    batch: int, first: str, reached: bool
) -> None:
    betas = Fraction(first), Fraction("0.999")
    known = KnownGood.read("4@0.001")
    setup = Setup(batch=batch, optimizer="adam", betas=betas, known_good=known)
    rates = explain(setup).learning_rates
    assert rates is not None
    by_rule = tuple(1 - Fraction(batch, 4) * (1 - beta) for beta in betas)
    assert rates.betas == (by_rule if reached else betas)
    assert rates.eps == pytest.approx(1e-8 / sqrt(batch / 4))


@pytest.mark.parametrize(
    ("text", "rate"), [("16@0.01", "1/100"), ("16@1e-3", "1/1000"), ("1@3", "3"), ("8@.5", "1/2")]
)
def test_a_known_good_is_read_exactly(text: str, rate: str) -> None:
    assert KnownGood.read(text).learning_rate == Fraction(rate)


@pytest.mark.parametrize(
    ("fields", "field", "right"),
    [
        ({"batch": True}, "batch", "a whole number from 1"),
        ({"known_good": "16@0.01"}, "known_good", "a KnownGood, such as KnownGood.read('16@0.01')"),
        ({"loss": "median"}, "loss", "one of mean, sum, token-mean"),
        ({"parallelism": "fsdp"}, "parallelism", "one of ddp, data-parallel"),
        ({"optimizer": "lion"}, "optimizer", "one of sgd, adam"),
        ({"betas": (Fraction(9, 10),)}, "betas", "two Fractions from 0, below 1"),
        ({"like": "fairseq"}, "like", "one of hf-trainer, accelerate"),
        ({"like": "nanogpt", "accumulation": "many"}, "accumulation", "a whole number from 1"),
    ],
)
def test_python_is_told_what_no_option_of_the_command_can_be(
    fields: dict[str, Any], field: str, right: str
) -> None:
    given = {"batch": 4, **fields}
    with pytest.raises(BadCase) as refused:
        setup_like(given.pop("like"), **given) if "like" in given else Setup(**given)
    assert refused.value.field == field
    assert right in refused.value.right
