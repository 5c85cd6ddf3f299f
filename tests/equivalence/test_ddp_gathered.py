"""DDP with one loss over the outputs of all ranks, gathered so that gradients flow back."""

from __future__ import annotations

import pytest

from ddp_equivalence import assert_equivalent
from ddp_equivalence.strategies.catalogue import Trial


@pytest.mark.promise_of("ddp_gathered")
def test_ddp_gathered_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)
