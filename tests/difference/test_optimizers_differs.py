"""Strategies that step with optimizers of torch.distributed, where the update is another one."""

from __future__ import annotations

import pytest

from ddp_equivalence import Case, check
from ddp_equivalence.strategies.catalogue import Trial

pytestmark = pytest.mark.difference


@pytest.mark.known_differences_of("zero")
def test_zero_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


@pytest.mark.known_differences_of("ddp_join")
def test_ddp_join_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


@pytest.mark.known_differences_of("post_local_sgd")
def test_post_local_sgd_differs_from_one_big_batch_under_its_known_name(trial: Trial) -> None:
    verdict = check(trial.case, trial.strategy, **trial.options)
    assert (verdict.outcome, verdict.cause) == ("different", trial.cause), str(verdict)


def test_the_gradients_of_post_local_sgd_are_those_of_a_node() -> None:
    verdict = check(Case(model="mlp", loss="mse_mean", layout="2x2"), "post_local_sgd")
    assert (verdict.outcome, verdict.cause) == ("different", "nodes_not_reduced"), str(verdict)
