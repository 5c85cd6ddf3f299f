"""DDP with its options, or without its wrapper, where the gradient is not the big batch's."""

from __future__ import annotations

import pytest

from ddp_equivalence import Case, check
from ddp_equivalence.strategies.catalogue import Trial
from ddp_equivalence.strategies.power_sgd import WHOLE_STEPS

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


def test_gradients_of_low_rank_are_different_and_have_no_cause() -> None:
    """An approximation is no mistake: nothing that is known of one predicts it."""
    case = Case(model="mlp", loss="mse_mean", layout="1x2")
    verdict = check(case, "power_sgd", steps=WHOLE_STEPS + 1)
    assert (verdict.outcome, verdict.cause) == ("different", None), str(verdict)


@pytest.mark.known_differences_of("sync_batch_norm")
def test_sync_batch_norm_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)
