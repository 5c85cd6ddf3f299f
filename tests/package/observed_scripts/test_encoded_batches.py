"""Batches that the script first gives to a module that it does not train."""

from __future__ import annotations

import pytest

from tests.package.observed_scripts.observing import observed, source_of_fault

KINDS = ["", "accumulating", "evaluating", "two_loaders", "tail"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_on_an_encoder_that_is_not_trained_is_right(kind: str) -> None:
    found = observed("encoded.py", *kind.split())
    steps = 4 if kind == "tail" else 3
    assert [verdict.outcome for verdict in found.verdicts] == ["same"] * steps, str(found)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_head_that_is_not_reduced_is_different(kind: str) -> None:
    found = observed("encoded.py", "wrong", *kind.split(), steps=1)
    assert found.outcome == "different", str(found)
    assert found.cause == "raw_module_called"
    assert "head(code)" in source_of_fault(found)


def test_an_optimizer_that_one_rank_leaves_out_is_different_with_both_lines() -> None:
    found = observed("encoded.py", "tail", "skipped", steps=4)
    assert [one.outcome for one in found.verdicts][:4] == ["same", "same", "unknown", "different"]
    assert found.outcome == "different", str(found)
    assert found.cause == "optimizers_differ_between_ranks"
    (finding,) = found.verdict.findings
    assert "rank 0 steps with Linear#1.bias and 1 more" in finding.headline
    assert [one.note.partition(" ")[0] for one in finding.lines] == ["rank", "rank"]
    assert "of_tail.step()" in str(found)
    assert "of_head.step()" in str(found)
