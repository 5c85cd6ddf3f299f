"""nn.DataParallel and its emulation, where the replicas' gradients add up to the big batch."""

from __future__ import annotations

import pytest

from ddp_equivalence import assert_equivalent
from ddp_equivalence.strategies.catalogue import Trial


@pytest.mark.promise_of("data_parallel")
def test_data_parallel_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)


@pytest.mark.promise_of("emulated_data_parallel")
def test_emulated_data_parallel_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)


@pytest.mark.promise_of("emulated_data_parallel_loss_inside")
def test_emulated_data_parallel_loss_inside_gives_the_gradients_of_one_big_batch(
    trial: Trial,
) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)
