"""Buffers that each rank moves by its own rows give the next step another gradient."""

from __future__ import annotations

import pytest

from tests.package.observed_scripts.observing import observed, source_of_fault

CODES = "self.codes.add_(moved, alpha=0.5)"
CENTRE = "self.codes[0] = 0.5 * centre + 0.5 * self.mean(values.detach())"
LOSS = "self.center = 0.5 * self.center + 0.5 * self.mean(values)"
OF_BIG_BATCH, BETWEEN_RANKS = "buffers_differ_from_big_batch", "buffers_differ_between_ranks"


@pytest.mark.parametrize(
    ("words", "cause", "line"),
    [
        ("codebook", OF_BIG_BATCH, CODES),
        ("centre", OF_BIG_BATCH, CENTRE),
        ("late", OF_BIG_BATCH, CODES),
        # DDP sends buffers from rank 0 to all ranks, and no other tensors.
        ("centre plain", BETWEEN_RANKS, CENTRE),
        ("late plain", BETWEEN_RANKS, CODES),
        ("loss plain", BETWEEN_RANKS, LOSS),
    ],
)
def test_state_that_each_rank_moves_by_its_own_rows_is_a_difference(
    words: str, cause: str, line: str
) -> None:
    found = observed("moving_state.py", *words.split())
    outcomes = [verdict.outcome for verdict in found.verdicts]
    assert outcomes == ["same", "different", "different"], str(found)
    assert found.cause == cause, str(found)
    assert source_of_fault(found) == line


@pytest.mark.parametrize(
    "words",
    [
        *("codebook", "centre plain", "normalised", "teacher", "teacher plain"),
        *("late", "scheduled", "loss plain", "keeps plain"),
    ],
)
def test_state_that_is_reduced_or_follows_the_weights_is_right(words: str) -> None:
    found = observed("moving_state.py", *words.split(), "reduced")
    assert [verdict.outcome for verdict in found.verdicts] == ["same"] * 3, str(found)
