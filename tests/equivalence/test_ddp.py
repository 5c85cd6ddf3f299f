"""DistributedDataParallel, with losses for which its average is the gradient of the big batch."""

from __future__ import annotations

import pytest

from ddp_equivalence import assert_equivalent
from ddp_equivalence.strategies.catalogue import Trial


@pytest.mark.promise_of("ddp_mean")
def test_ddp_mean_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)


@pytest.mark.promise_of("ddp_sum")
def test_ddp_sum_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)


@pytest.mark.promise_of("ddp_sum_hook")
def test_ddp_sum_hook_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)


@pytest.mark.promise_of("ddp_global_mean")
def test_ddp_global_mean_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)
