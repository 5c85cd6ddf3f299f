"""DDP with its options, and without its wrapper, where the promise holds."""

from __future__ import annotations

import pytest

from ddp_equivalence import assert_equivalent
from ddp_equivalence.strategies.catalogue import Trial


@pytest.mark.promise_of("ddp_static_graph")
def test_ddp_static_graph_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)


@pytest.mark.promise_of("ddp_checkpointed")
def test_ddp_checkpointed_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)


@pytest.mark.promise_of("replicate")
def test_replicate_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)


@pytest.mark.promise_of("ddp_autocast")
def test_ddp_autocast_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)


@pytest.mark.promise_of("ddp_compiled")
def test_ddp_compiled_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)


@pytest.mark.promise_of("power_sgd")
def test_power_sgd_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)
