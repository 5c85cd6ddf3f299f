"""Every rank and every example is compared; the outcome is unknown if the shares are unknown."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
from torch import nn

from ddp_equivalence.case import settings
from ddp_equivalence.checking.check import check
from ddp_equivalence.commands.explain import Setup, explain, verification
from ddp_equivalence.commands.explain.verification import (
    ExpectedResult,
    Measured,
    case_of,
    counts_of,
    expected,
    gradient_step,
    judged,
    measured,
    verify,
)
from ddp_equivalence.ranks import Rank

pytestmark = pytest.mark.self_check

DDP = Setup(batch=4, ranks_per_node=2)
UNEVEN = Setup(batch=5, ranks_per_node=2, parallelism="data-parallel-loss-inside")
TOKENS = replace(DDP, loss="token-mean", accumulation=2, accumulation_divided=False)


def four_times_on_the_last_rank(setup: Setup, model: nn.Module, shard: Any, rank: Rank) -> None:
    gradient_step(setup, model, shard, rank)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 4 if rank.rank == 1 else 1


def something_added(setup: Setup, added: float, model: nn.Module, shard: Any, rank: Rank) -> None:
    gradient_step(setup, model, shard, rank)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad += added


@pytest.mark.parametrize("factor", [1, 4])
def test_ranks_with_different_factors_agree_with_neither(factor: int) -> None:
    with settings.using(settings.replaced(second_look=False)):
        verdict = check(case_of(DDP, 1), partial(four_times_on_the_last_rank, DDP))
    found = measured(verdict)
    assert found is not None
    assert found.factors == pytest.approx((1, 4))
    judgement = judged("gradient", ExpectedResult(Fraction(factor), None), found)
    assert (judgement.outcome, judgement.measured) == ("differs", "1, 4 (by rank) g")


ROW = (5 / 6, 5 / 6, 5 / 6, 5 / 4, 5 / 4)


@pytest.mark.parametrize(
    ("shares", "outcome"),
    [
        ((ROW, ROW), "agrees"),
        ((ROW, ROW[::-1]), "differs"),
        ((tuple(2 * share for share in ROW),) * 2, "differs"),
        (None, "unknown"),
    ],
)
def test_every_example_on_every_rank_is_held_to_its_share(
    shares: tuple[tuple[float, ...], ...] | None, outcome: str
) -> None:
    wanted = expected(explain(UNEVEN), [1] * 5)
    found = Measured((1.0, 1.0), 0.3, shares, "they are too alike")
    judgement = judged("gradient", wanted, found)
    assert judgement.outcome == outcome
    told = "unknown how often each example counts: they are too alike." in judgement.why
    assert told is (outcome == "unknown")


def test_what_is_of_no_example_is_not_as_predicted() -> None:
    wanted = expected(explain(UNEVEN), [1] * 5)
    right = judged("gradient", wanted, Measured((1.0,), 0.3, (ROW,), unmixed=1e-12))
    wrong = judged("gradient", wanted, Measured((1.0,), 0.3, (ROW,), unmixed=1e-3))
    assert (right.outcome, wrong.outcome) == ("agrees", "differs")
    assert "0.001 of it comes from no example" in wrong.measured


@pytest.mark.parametrize("added", [0.0, 0.1])
def test_what_a_step_adds_is_measured_as_of_no_example(added: float) -> None:
    with settings.using(settings.replaced(second_look=False)):
        verdict = check(case_of(UNEVEN, 1), partial(something_added, UNEVEN, added))
    found = measured(verdict)
    assert found is not None
    assert (found.unmixed > 1e-3) is bool(added)


def test_shares_that_are_not_those_of_the_ranks_are_seen() -> None:
    right = explain(UNEVEN)
    # Three examples for two and two for three: on average it is 1 as before.
    wrong = ((2, Fraction(5, 4)), (3, Fraction(5, 6)))
    assert verify(right).outcome == "agrees"
    assert verify(replace(right, shares=wrong)).outcome == "differs"


def test_token_shares_are_worked_out_by_hand() -> None:
    # Four means over 3, 5, 7 and 10 tokens are added up; the big batch divides by all 25.
    setup = Setup(
        batch=2,
        ranks_per_node=2,
        loss="token-mean",
        accumulation=2,
        accumulation_divided=False,
        parallelism="all-reduce-sum",
    )
    shares = expected(explain(setup), [1, 2, 2, 3, 4, 3, 6, 4]).shares
    assert shares is not None
    assert shares[::2] == tuple(Fraction(25, tokens) for tokens in (3, 5, 7, 10))
    assert shares[::2] == shares[1::2]


def test_tokens_that_do_not_count_as_predicted_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = explain(TOKENS)
    assert verify(right).outcome == "agrees"
    counts = list(counts_of(TOKENS))
    swapped = [*counts[:3], counts[-1], *counts[4:-1], counts[3]]
    monkeypatch.setattr(verification, "counts_of", lambda setup: swapped)
    assert verify(right).outcome == "differs"


def test_a_small_setup_that_is_another_question_is_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup(batch=20, ranks_per_node=10, parallelism="data-parallel-loss-inside")
    monkeypatch.setattr(
        verification, "scaled_down", lambda one: (replace(one, ranks_per_node=8), ("8 for 10",))
    )
    found = verify(explain(setup))
    assert found.outcome == "unknown"
    assert "it is not the same question" in found.comparisons[0].why
