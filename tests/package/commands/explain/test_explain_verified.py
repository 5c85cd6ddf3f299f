"""Ranks compute what is explained, for every parallelism and loss, and contradict what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, get_args

import pytest

from ddp_equivalence.checking.check import check
from ddp_equivalence.commands.explain import Explanation, KnownGood, Setup, explain, verification
from ddp_equivalence.commands.explain.setup import Loss, Parallelism, TokensOver
from ddp_equivalence.commands.explain.verification import (
    case_of,
    gradient_step,
    scaled_down,
    shares_by_example,
    verify,
)
from ddp_equivalence.ranks import Rank
from tests.combinations import each_once

pytestmark = pytest.mark.self_check

LOSSES: tuple[Loss, ...] = ("mean", "sum", "token-mean")
SEVERAL: tuple[Parallelism, ...] = ("ddp", "hybrid", "all-reduce-sum")


def setups() -> Iterator[Setup]:
    """For every parallelism and loss one micro-batch, and three, whose losses are divided in every
    other setup. Batches of 5 are uneven over replicas.
    """
    for number, parallelism in enumerate(get_args(Parallelism)):
        nodes, ranks = (2, 2) if parallelism in SEVERAL else (1, 2)
        for place, loss in enumerate(LOSSES):
            one = Setup(
                batch=4 if (number + place) % 2 else 5,
                nodes=nodes,
                ranks_per_node=1 if parallelism == "none" else ranks,
                loss=loss,
                parallelism=parallelism,
            )
            yield one
            divided = (number + place) % 2 == 0
            yield replace(one, accumulation=3, accumulation_divided=divided)


def name(setup: Setup) -> str:
    divided = {None: "", True: "-divided", False: "-not-divided"}[setup.accumulation_divided]
    return f"{setup.parallelism}-{setup.loss}-{setup.batch}{divided}"


def outcomes(explanation: Explanation) -> list[str]:
    return [verdict.outcome for verdict in verify(explanation).checks.values()]


@pytest.mark.parametrize("setup", list(setups()), ids=name)
def test_ranks_hold_what_is_explained(setup: Setup) -> None:
    explanation = explain(setup)
    found = verify(explanation)
    assert found.outcome == "same", found
    assert len(found.checks) == (2 if explanation.is_multiple else 3)
    assert found.scaled == ()


@pytest.mark.parametrize(("parallelism", "tokens_over"), each_once(SEVERAL, get_args(TokensOver)))
def test_ranks_count_tokens_as_it_is_explained(
    parallelism: Parallelism, tokens_over: TokensOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(
        batch=3,
        nodes=2,
        ranks_per_node=2,
        loss="token-mean",
        tokens_over=tokens_over,
        loss_times="world-size/3",
        parallelism=parallelism,
        accumulation=2,
        accumulation_divided=False,
        optimizer="adam",
    )
    explanation = explain(setup)
    assert explanation.is_multiple == (tokens_over == "all-ranks")
    assert set(outcomes(explanation)) == {"same"}
    monkeypatch.setattr(verification, "counts_of", lambda setup, loss: Fraction(1))
    wrong = replace(explanation, factor=explanation.factor * 2)
    assert outcomes(wrong)[0] == "different"


def with_rates(**changes: Fraction) -> Callable[[Any], Any]:
    return lambda one: replace(one, learning_rates=replace(one.learning_rates, **changes))


def with_factor(factor: Fraction) -> Callable[[Any], Any]:
    return lambda one: replace(one, factor=factor)


def wrongly_mended(one: Any) -> Any:
    return replace(one, mended=replace(one.mended, factor=Fraction(3)))


MEAN = Setup(batch=4, ranks_per_node=2)
SUM = replace(MEAN, loss="sum")
RATE = replace(SUM, known_good=KnownGood.read("8@0.05"))
ADAM = replace(
    MEAN, parallelism="all-reduce-sum", optimizer="adam", known_good=KnownGood.read("8@0.01")
)
UNEVEN = Setup(batch=5, ranks_per_node=2, parallelism="data-parallel-loss-inside")
MENDED = replace(
    UNEVEN,
    batch=8,
    ranks_per_node=3,
    accumulation=2,
    accumulation_divided=True,
    known_good=KnownGood.read("16@0.1"),
)
# Three examples for two and two for three: on average each counts once, as it should.
SWAPPED = ((2, Fraction(5, 4)), (3, Fraction(5, 6)))


@pytest.mark.parametrize(
    ("setup", "change", "differ"),
    [
        (MEAN, with_factor(Fraction(2)), ["different", "different"]),
        (MEAN, with_factor(Fraction(1001, 1000)), ["different", "different"]),
        (SUM, with_factor(Fraction(8)), ["different", "different"]),
        (RATE, with_rates(same_step=Fraction("0.025")), ["same", "different"]),
        (ADAM, with_rates(relative=Fraction(1)), ["same", "different"]),
        (UNEVEN, lambda one: replace(one, mended=None), ["different", "different"]),
        (UNEVEN, lambda one: replace(one, shares=SWAPPED), ["different", "same", "same"]),
        (MENDED, with_rates(same_step=Fraction("0.2")), ["same", "same", "different"]),
        (MENDED, wrongly_mended, ["same", "different", "same"]),
    ],
    ids=[
        *("factor", "factor by a thousandth", "factor of a sum", "rate", "eps of Adam"),
        *("taken for a multiple", "other counts", "rate of the mend", "factor of the mend"),
    ],
)
def test_ranks_contradict_what_is_wrong_and_nothing_else(
    setup: Setup, change: Callable[[Any], Any], differ: list[str]
) -> None:
    right = explain(setup)
    assert set(outcomes(right)) == {"same"}
    assert outcomes(change(right)) == differ


def test_every_rank_and_everything_beside_the_examples_is_compared() -> None:
    setup = Setup(batch=4, ranks_per_node=2)

    def step(factor: float, added: float, model: Any, shard: Any, rank: Rank) -> None:
        gradient_step(setup, model, shard, rank)
        for parameter in model.parameters():
            parameter.grad *= factor if rank.rank == 1 else 1
            parameter.grad += added

    case = case_of(setup, [Fraction(1)] * 8)
    assert check(case, partial(step, 1, 0.0)).outcome == "same"
    assert check(case, partial(step, 4, 0.0)).outcome == "different"
    assert check(case, partial(step, 1, 0.1)).outcome == "different"


def test_token_shares_are_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # Four means over 3, 5, 7 and 10 tokens are added up; the big batch divides by all 25.
    setup = Setup(
        batch=2,
        ranks_per_node=2,
        loss="token-mean",
        accumulation=2,
        accumulation_divided=False,
        parallelism="all-reduce-sum",
    )
    monkeypatch.setattr(verification, "_token_counts", lambda _: [1, 2, 2, 3, 4, 3, 6, 4])
    shares = shares_by_example(explain(setup))
    assert shares[::2] == [Fraction(25, tokens) for tokens in (3, 5, 7, 10)]
    assert shares[::2] == shares[1::2]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"known_good": KnownGood.read("1000@0.1")},
            "Not run: the square-root and the linear learning rate.",
        ),
        ({"parallelism": "all-reduce-sum"}, "Not run: weight decay and clipping."),
        ({"examples": 100}, "Not run: the epoch."),
        ({"known_good": KnownGood.read("8@5")}, "one big batch with 0.1 (yours x 0.02):"),
        (
            {"loss": "sum", "known_good": KnownGood.read("8@0.05")},
            "with learning rate 0.0125, one big batch with 0.05:",
        ),
    ],
)
def test_what_is_not_run_is_said(fields: dict[str, Any], says: str) -> None:
    found = verify(explain(Setup(batch=4, ranks_per_node=2, **fields)))
    assert found.outcome == "same", found
    assert says in " ".join(str(found).split())
    assert bool(found.not_run) or "Not run" not in says


def test_parameters_without_a_gradient_do_not_hide_the_others() -> None:
    # One token: the GRU's hidden weights meet a hidden state of zero.
    assert set(outcomes(explain(Setup(batch=1, loss="token-mean", parallelism="none")))) == {"same"}


def test_a_large_setup_is_verified_on_fewer_ranks_and_says_so() -> None:
    setup = Setup(
        batch=256,
        nodes=16,
        ranks_per_node=8,
        loss="token-mean",
        accumulation=64,
        accumulation_divided=True,
    )
    found = verify(explain(setup))
    assert found.outcome == "same", found
    assert found.scaled == (
        "nodes 2 instead of 16",
        "ranks_per_node 4 instead of 8",
        "accumulation 8 instead of 64",
        "batch 6 instead of 256",
    )
    assert "Scaled down: nodes" in str(found)


INSIDE = Setup(batch=1, parallelism="data-parallel-loss-inside")


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5, 7, 8, 9, 10, 13, 16, 31, 100])
def test_the_small_batch_is_dealt_to_the_replicas_like_the_real_one(replicas: int) -> None:
    for batch in range(1, 120):
        setup = replace(INSIDE, batch=batch, ranks_per_node=replicas)
        small, _ = scaled_down(setup)
        assert explain(small).is_multiple == explain(setup).is_multiple
        all_busy = len(setup.replica_sizes(batch)) == setup.replicas
        assert (len(small.replica_sizes(small.batch)) == small.replicas) == all_busy
        assert small.batch <= batch
