"""Buffers that each rank moves by its own rows give the next step another gradient."""

from __future__ import annotations

import pytest

from tests.package.observed_scripts.observing import observed, source_of_fault


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("codebook", "self.codes.add_(moved, alpha=0.5)"),
        ("centre", "self.codes[0] = 0.5 * centre + 0.5 * self.mean(values.detach())"),
        ("late", "self.codes.add_(moved, alpha=0.5)"),
    ],
)
def test_state_that_each_rank_moves_by_its_own_rows_is_a_difference(kind: str, line: str) -> None:
    found = observed("moving_state.py", kind)
    outcomes = [verdict.outcome for verdict in found.verdicts]
    assert outcomes == ["same", "different", "different"], str(found)
    assert found.cause == "buffers_differ_from_big_batch", str(found)
    assert source_of_fault(found) == line


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("codebook", "self.codes.add_(moved, alpha=0.5)"),
        ("centre", "self.codes[0] = 0.5 * centre + 0.5 * self.mean(values.detach())"),
        ("late", "self.codes.add_(moved, alpha=0.5)"),
        ("loss", "self.center = 0.5 * self.center + 0.5 * self.mean(values)"),
    ],
)
def test_such_state_in_a_plain_tensor_is_a_difference(kind: str, line: str) -> None:
    """DDP sends buffers from rank 0 to all ranks, and no other tensors."""
    found = observed("moving_state.py", kind, "plain")
    outcomes = [verdict.outcome for verdict in found.verdicts]
    assert outcomes == ["same", "different", "different"], str(found)
    assert found.cause == "buffers_differ_between_ranks", str(found)
    assert source_of_fault(found) == line


@pytest.mark.parametrize(
    "kind", ["codebook", "centre", "normalised", "teacher", "late", "scheduled", "loss", "keeps"]
)
@pytest.mark.parametrize("how", ["buffer", "plain"])
def test_state_that_is_reduced_or_follows_the_weights_is_right(kind: str, how: str) -> None:
    found = observed("moving_state.py", kind, "reduced", how)
    assert [verdict.outcome for verdict in found.verdicts] == ["same"] * 3, str(found)
