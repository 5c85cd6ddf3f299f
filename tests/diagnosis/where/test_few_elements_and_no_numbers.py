"""What is said of gradients that are no numbers, or too few or too small to tell."""

from __future__ import annotations

import pytest

from ddp_equivalence import check
from tests.diagnosis.names import test_told
from tests.diagnosis.names.small_case import case
from tests.diagnosis.where.faulty import where

pytestmark = pytest.mark.self_check


def test_a_loss_that_is_no_number_is_not_the_loss_of_its_rows() -> None:
    found = where(case(), test_told.not_a_number_on_rank_1)
    assert found.headline.startswith("rank 1: its loss is nan, its own rows give 0.")
    assert "leaves the right way at" not in found.sentence


def test_the_line_that_makes_no_numbers_of_right_gradients_is_marked() -> None:
    found = where(case(), test_told.not_a_number_afterwards)
    assert found.headline == "right gradients are changed afterwards"
    assert [one.is_fault for one in found.lines] == [False, True]
    assert "What was compared is" not in found.sentence
    assert found.ranks == (1,)


def test_what_few_elements_hold_is_not_said_to_be_no_mixture() -> None:
    """Three elements are a mixture of any gradients, so that nothing can be said of them."""
    found = where(case(), test_told.unlike_factors)
    assert "no weighted sum" not in found.sentence, found.sentence
    assert "rank 0 1.5, rank 1 0.1667" in found.sentence


def test_on_one_rank_batch_norm_is_the_only_name_for_its_micro_batches() -> None:
    """On one rank no reduction can come too early."""
    verdict = check(test_told.HALVES, test_told.in_two_halves)
    accepted = {cause for one in verdict.findings if one.accepted for cause in one.causes}
    assert accepted == {"batch_norm_local_statistics"}, verdict
    assert "each part's own statistics" in " ".join(str(verdict).split())
