"""DistributedDataParallel, where its average is not the gradient of the big batch."""

from __future__ import annotations

import pytest

from ddp_equivalence import check
from ddp_equivalence.strategies.catalogue import Trial

pytestmark = pytest.mark.difference


@pytest.mark.known_differences_of("ddp_mean")
def test_ddp_mean_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


@pytest.mark.known_differences_of("ddp_sum")
def test_ddp_sum_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


@pytest.mark.known_differences_of("ddp_sum_hook")
def test_ddp_sum_hook_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


@pytest.mark.known_differences_of("ddp_global_mean")
def test_ddp_global_mean_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)
