"""The sum inside a node or a rank, and the average between them, where they differ."""

from __future__ import annotations

import pytest

from ddp_equivalence import check
from ddp_equivalence.strategies.catalogue import Trial

pytestmark = pytest.mark.difference


@pytest.mark.known_differences_of("hybrid")
def test_hybrid_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


@pytest.mark.known_differences_of("hybrid_data_parallel")
def test_data_parallel_inside_each_rank_differs_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)
