"""What the loss, the reduction and the big batch divide by, and the factor that would be right."""

from __future__ import annotations

import pytest

from ddp_equivalence import Case, check

pytestmark = pytest.mark.self_check


def test_tokens_are_counted_and_the_right_factor_makes_it_the_big_batch() -> None:
    verdict = check(Case(model="gru_tied", loss="token_mean", shards="uneven"), "ddp_mean")
    divisors = verdict.divisors
    assert divisors is not None
    assert (divisors.kind, divisors.unit) == ("mean", "the targets that are not -100")
    assert divisors.big_batch == sum(divisors.counts)
    assert divisors.reduction == pytest.approx(2)
    # The world size times the rank's tokens over those of all ranks.
    right = [2 * count / divisors.big_batch for count in divisors.counts]
    assert divisors.right_factors == pytest.approx(right)
    assert "Whose mean is it?" in verdict.full_report()


def test_a_sum_divided_by_the_ranks_has_the_world_size_as_factor() -> None:
    divisors = check(Case(model="mlp", loss="mse_sum", layout="2x2"), "ddp_mean").divisors
    assert divisors is not None
    assert divisors.kind == "sum"
    assert divisors.reduction == pytest.approx(4)
    assert divisors.right_factors == pytest.approx([4, 4, 4, 4])


def test_a_sum_of_means_over_different_counts_has_no_single_divisor() -> None:
    case = Case(model="mlp", loss="two_normalisers", layout="1+3")
    assert check(case, "ddp_mean").divisors is None
