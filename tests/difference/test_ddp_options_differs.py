"""DDP with its options, or without its wrapper, where the gradient is not the big batch's."""

from __future__ import annotations

import pytest

from ddp_equivalence import check
from ddp_equivalence.strategies.catalogue import Trial

pytestmark = pytest.mark.difference


@pytest.mark.known_differences_of("ddp_static_graph")
def test_ddp_static_graph_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


@pytest.mark.known_differences_of("ddp_checkpointed")
def test_ddp_checkpointed_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


@pytest.mark.known_differences_of("replicate")
def test_replicate_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


@pytest.mark.known_differences_of("ddp_autocast")
def test_ddp_autocast_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


@pytest.mark.known_differences_of("ddp_compiled")
def test_ddp_compiled_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


@pytest.mark.known_differences_of("power_sgd")
def test_power_sgd_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)
