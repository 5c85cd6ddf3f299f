"""Factors and learning rates are those that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import isclose, sqrt
from typing import Any

import pytest

from ddp_equivalence.commands.explain import KnownGood, Setup, explain
from ddp_equivalence.commands.explain.explanation import ADAM_BETAS

TWO_BY_TWO = {"nodes": 2, "ranks_per_node": 2}
DIVIDED = {"accumulation": 3, "accumulation_divided": True}
NOT_DIVIDED = {"accumulation": 3, "accumulation_divided": False}

INSIDE = {"parallelism": "data-parallel-loss-inside", "ranks_per_node": 4}
HYBRID = {"parallelism": "hybrid", **TWO_BY_TWO}

HAND_COMPUTED: list[tuple[dict[str, Any], int, Fraction, str]] = [
    # setup, effective batch, factor, learning rate where 0.01 worked with that batch and a mean
    # 16 on one machine with 4 GPUs, 8 on each of two with 2, and 4 on each of 4 ranks: all alike.
    ({"batch": 16, "parallelism": "data-parallel", "ranks_per_node": 4}, 16, Fraction(1), "0.01"),
    ({"batch": 8, "parallelism": "hybrid", **TWO_BY_TWO}, 16, Fraction(1), "0.01"),
    ({"batch": 4, "parallelism": "ddp", **TWO_BY_TWO}, 16, Fraction(1), "0.01"),
    # The sum of 4 local means is 4 times their mean.
    ({"batch": 4, "parallelism": "all-reduce-sum", **TWO_BY_TWO}, 16, Fraction(4), "0.0025"),
    # Sums over 4 examples, averaged over 4 ranks: (16 g) / 4.
    ({"batch": 4, "loss": "sum", **TWO_BY_TWO}, 16, Fraction(4), "0.0025"),
    ({"batch": 5, "loss": "sum", **TWO_BY_TWO}, 20, Fraction(5), "0.002"),
    (
        {"batch": 4, "loss": "sum", "parallelism": "all-reduce-sum", **TWO_BY_TWO},
        16,
        Fraction(16),
        "0.000625",
    ),
    # DataParallel's one loss over the gathered outputs is a sum over the whole batch.
    (
        {"batch": 16, "loss": "sum", "parallelism": "data-parallel", "ranks_per_node": 4},
        16,
        Fraction(16),
        "0.000625",
    ),
    # Inside, it is a sum over 4, and the mean of 4 of these is taken.
    (
        {"batch": 16, "loss": "sum", **INSIDE},
        16,
        Fraction(4),
        "0.0025",
    ),
    (
        {"batch": 16, "parallelism": "data-parallel-loss-inside", "ranks_per_node": 4},
        16,
        Fraction(1),
        "0.01",
    ),
    (
        {"batch": 8, "loss": "sum", **HYBRID},
        16,
        Fraction(8),
        "0.00125",
    ),
    # Three means added up are three times their mean.
    ({"batch": 4, **TWO_BY_TWO, **DIVIDED}, 48, Fraction(1), "0.01"),
    ({"batch": 4, **TWO_BY_TWO, **NOT_DIVIDED}, 48, Fraction(3), "1/300"),
    ({"batch": 4, "loss": "sum", **TWO_BY_TWO, **DIVIDED}, 48, Fraction(4), "0.0025"),
    ({"batch": 4, "loss": "sum", **TWO_BY_TWO, **NOT_DIVIDED}, 48, Fraction(12), "1/1200"),
    (
        {"batch": 4, "parallelism": "all-reduce-sum", **TWO_BY_TWO, **NOT_DIVIDED},
        48,
        Fraction(12),
        "1/1200",
    ),
    ({"batch": 7, "parallelism": "none"}, 7, Fraction(1), "0.01"),
    ({"batch": 7, "parallelism": "none", "loss": "sum", **DIVIDED}, 21, Fraction(7), "1/700"),
    ({"batch": 7, "parallelism": "none", "loss": "token-mean"}, 7, Fraction(1), "0.01"),
]


@pytest.mark.parametrize(("fields", "batch", "factor", "rate"), HAND_COMPUTED)
def test_factor_and_learning_rate_are_as_worked_out_by_hand(
    fields: dict[str, Any], batch: int, factor: Fraction, rate: str
) -> None:
    found = explain(Setup(**fields, known_good=KnownGood(batch, Fraction("0.01"))))
    assert (found.effective_batch, found.factor, found.is_multiple) == (batch, factor, True)
    assert found.learning_rates is not None
    assert found.learning_rates.same_step == Fraction(rate)
    assert found.learning_rates.linear == Fraction(rate)


@pytest.mark.parametrize(
    ("fields", "multiple"),
    [
        ({"parallelism": "ddp", "ranks_per_node": 2}, False),
        ({"parallelism": "ddp"}, True),
        ({"parallelism": "ddp", **DIVIDED}, False),
        ({"parallelism": "data-parallel", "ranks_per_node": 2}, True),
        ({"parallelism": "data-parallel", "ranks_per_node": 2, **DIVIDED}, False),
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


def test_an_uneven_split_counts_examples_unequally_and_once_on_average() -> None:
    setup = Setup(batch=5, ranks_per_node=2, parallelism="data-parallel-loss-inside")
    found = explain(setup)
    # Means over 3 and 2, averaged: 1/6 and 1/4 of an example's gradient, where 1/5 is right.
    assert found.shares == ((3, Fraction(5, 6)), (2, Fraction(5, 4)))
    assert (found.factor, found.is_multiple) == (Fraction(1), False)


@pytest.mark.parametrize(
    ("batch", "replicas", "sizes"),
    [(5, 4, (2, 2, 1)), (3, 4, (1, 1, 1)), (9, 4, (3, 3, 3)), (8, 4, (2, 2, 2, 2))],
)
def test_replicas_get_what_chunk_gives_them(
    batch: int, replicas: int, sizes: tuple[int, ...]
) -> None:
    import torch

    setup = Setup(batch=batch, ranks_per_node=replicas, parallelism="data-parallel")
    assert setup.replica_sizes == sizes
    assert setup.replica_sizes == tuple(map(len, torch.zeros(batch).chunk(replicas)))


def test_at_another_batch_each_rule_keeps_its_own() -> None:
    setup = Setup(
        batch=4, parallelism="all-reduce-sum", ranks_per_node=4, known_good=KnownGood.read("2@0.01")
    )
    rates = explain(setup).learning_rates
    assert rates is not None
    assert (rates.scaling, rates.relative) == (Fraction(8), Fraction(4))
    assert rates.same_step == Fraction("0.0025")
    assert rates.linear == Fraction("0.02")
    assert isclose(rates.square_root, 0.0025 * sqrt(8))


def test_a_known_sum_is_put_on_the_same_footing() -> None:
    known = KnownGood.read("16@0.001", loss="sum")
    mean = explain(Setup(batch=4, ranks_per_node=4, known_good=known))
    total = explain(
        Setup(batch=4, ranks_per_node=4, loss="sum", parallelism="all-reduce-sum", known_good=known)
    )
    assert mean.learning_rates is not None
    assert total.learning_rates is not None
    assert mean.learning_rates.same_step == Fraction("0.016")
    assert total.learning_rates.same_step == Fraction("0.001")


def test_adams_learning_rate_knows_no_factor_and_has_both_rules() -> None:
    setup = Setup(
        batch=4,
        ranks_per_node=4,
        parallelism="all-reduce-sum",
        optimizer="adam",
        known_good=KnownGood.read("4@0.001"),
    )
    rates = explain(setup).learning_rates
    assert rates is not None
    assert rates.adam is not None
    assert (rates.same_step, rates.linear) == (Fraction("0.001"), Fraction("0.004"))
    assert isclose(rates.square_root, 0.002)
    assert rates.adam.betas == (Fraction("0.6"), Fraction("0.996"))
    assert isclose(rates.adam.eps, 5e-9)


@pytest.mark.parametrize(
    ("batch", "reached"), [(20, True), (21, False), (40, False), (4000, False)]
)
def test_the_root_rule_for_adam_gives_betas_that_average_two_gradients(
    batch: int, reached: bool
) -> None:
    setup = Setup(batch=batch, optimizer="adam", known_good=KnownGood.read("4@0.001"))
    rates = explain(setup).learning_rates
    assert rates is not None
    assert rates.adam is not None
    assert rates.adam.in_reach == reached
    expected = (Fraction(1, 2), Fraction(199, 200)) if reached else ADAM_BETAS
    assert rates.adam.betas == expected


@pytest.mark.parametrize("first", [Fraction(0), Fraction(49, 100)])
def test_the_root_rule_is_not_used_for_betas_that_average_over_few_gradients(
    first: Fraction,
) -> None:
    betas = first, Fraction(99, 100)
    known = KnownGood.read("64@0.001")
    rates = explain(Setup(batch=4, optimizer="adam", betas=betas, known_good=known)).learning_rates
    assert rates is not None
    assert rates.adam is not None
    assert rates.adam.rule_betas[0] > Fraction(1, 2)
    assert rates.adam.betas == betas


@pytest.mark.parametrize(("divided", "rate"), [(False, "0.005"), (True, "0.01")])
def test_uneven_replicas_that_are_mended_still_accumulate(divided: bool, rate: str) -> None:
    # Means over 6, 6 and 4, twice. One mean over the 16 instead, twice: 2 g unless divided by 2.
    setup = Setup(
        batch=16,
        ranks_per_node=3,
        parallelism="data-parallel-loss-inside",
        accumulation=2,
        accumulation_divided=divided,
        known_good=KnownGood.read("32@0.01"),
    )
    found = explain(setup)
    gathered = explain(replace(setup, parallelism="data-parallel"))
    assert found.mended_factor == gathered.factor == Fraction("0.01") / Fraction(rate)
    assert found.learning_rates == gathered.learning_rates
    assert found.learning_rates is not None
    assert found.learning_rates.same_step == Fraction(rate)


def test_a_gradient_that_must_be_mended_gets_the_learning_rate_of_g() -> None:
    setup = Setup(
        batch=4,
        ranks_per_node=4,
        loss="token-mean",
        accumulation=3,
        accumulation_divided=False,
        known_good=KnownGood.read("48@0.01"),
    )
    found = explain(setup)
    assert (found.factor, found.is_multiple) == (Fraction(3), False)
    assert found.learning_rates is not None
    assert found.learning_rates.same_step == Fraction("0.01")
