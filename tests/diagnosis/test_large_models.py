"""If a model is too large to keep, a sample of its elements is enough to name the cause."""

from __future__ import annotations

import pytest

from ddp_equivalence import Case, check
from ddp_equivalence.diagnosis import shares
from ddp_equivalence.faults.plant import planted

pytestmark = pytest.mark.self_check

MLP = Case(model="mlp", loss="mse_mean", layout="2x2")


@pytest.fixture(autouse=True)
def few_elements_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty of the 244 elements are kept on each of four ranks."""
    monkeypatch.setattr(shares, "MAX_ELEMENTS", 240)
    monkeypatch.setattr(shares, "MAX_SELECTED", 240)


@pytest.mark.parametrize(
    "cause",
    ["sum_not_mean", "averaged_twice", "no_all_reduce", "rank_left_out", "bucket_not_reduced"],
)
def test_a_sample_names_the_cause(cause: str) -> None:
    with planted(cause):
        verdict = check(MLP, "ddp_mean")
    assert verdict.view is not None
    assert len(verdict.view.expected) < 244
    assert verdict.cause == cause, verdict


def test_shares_of_a_sample_are_those_of_the_whole() -> None:
    with planted("rank_left_out"):
        verdict = check(MLP, "ddp_mean")
    assert verdict.shares is not None
    assert verdict.shares.by_rank[0] == pytest.approx([1, 1, 1, 0], abs=1e-9)
    assert verdict.shares.elements < 244
