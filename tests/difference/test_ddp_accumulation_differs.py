"""DDP with micro-batches under no_sync, where its promise does not hold."""

from __future__ import annotations

import pytest

from ddp_equivalence import check
from ddp_equivalence.strategies.catalogue import Trial

pytestmark = pytest.mark.difference


@pytest.mark.known_differences_of("ddp_accumulation")
def test_ddp_accumulation_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)
