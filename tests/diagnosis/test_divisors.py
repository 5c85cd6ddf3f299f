"""Whose mean is it? What the loss divides by, what the ranks do, and the factor that is right."""

from __future__ import annotations

import pytest

from ddp_equivalence import Case, check

pytestmark = pytest.mark.self_check


def test_tokens_are_counted_and_the_right_factor_makes_it_the_big_batch() -> None:
    verdict = check(Case(model="gru_tied", loss="token_mean", shards="uneven"), "ddp_mean")
    found = verdict.whose_mean
    assert found is not None
    assert (found.kind, found.what) == ("mean", "elements of targets that are not -100")
    assert found.whole == sum(found.counts)
    assert found.divided == pytest.approx(2)
    # The world size times the rank's tokens over those of all.
    assert found.right == pytest.approx([2 * count / found.whole for count in found.counts])
    assert "Whose mean is it?" in str(verdict)


def test_a_sum_divided_by_the_ranks_has_the_world_size_as_factor() -> None:
    found = check(Case(model="mlp", loss="mse_sum", layout="2x2"), "ddp_mean").whose_mean
    assert found is not None
    assert found.kind == "sum"
    assert found.divided == pytest.approx(4)
    assert found.right == pytest.approx([4, 4, 4, 4])


def test_a_sum_of_means_over_different_counts_has_no_single_divisor() -> None:
    case = Case(model="mlp", loss="two_normalisers", layout="1+3")
    assert check(case, "ddp_mean").whose_mean is None
