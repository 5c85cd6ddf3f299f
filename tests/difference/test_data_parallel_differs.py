"""nn.DataParallel and its emulation, where their promises do not hold."""

from __future__ import annotations

import pytest

from ddp_equivalence import check
from ddp_equivalence.strategies.catalogue import Trial

pytestmark = pytest.mark.difference


@pytest.mark.known_differences_of("data_parallel")
def test_data_parallel_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


@pytest.mark.known_differences_of("emulated_data_parallel")
def test_emulated_data_parallel_differs_from_one_big_batch_under_its_known_name(
    trial: Trial,
) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


@pytest.mark.known_differences_of("emulated_data_parallel_loss_inside")
def test_emulated_data_parallel_loss_inside_differs_from_one_big_batch_under_its_known_name(
    trial: Trial,
) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)
