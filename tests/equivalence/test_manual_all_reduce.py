"""Gradients that the step itself all-reduces, where the promise holds."""

from __future__ import annotations

import pytest

from ddp_equivalence import assert_equivalent
from ddp_equivalence.strategies.catalogue import Trial


@pytest.mark.promise_of("manual_all_reduce_mean")
def test_manual_all_reduce_mean_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)


@pytest.mark.promise_of("manual_all_reduce_sum")
def test_manual_all_reduce_sum_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)
