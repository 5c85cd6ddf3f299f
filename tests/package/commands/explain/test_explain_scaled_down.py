"""A large setup is run as a smaller one whose batch is dealt to the replicas in the same way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_equivalence.commands.explain import Setup, explain
from ddp_equivalence.commands.explain.verification import MOST_TOLD_APART, scaled_down, verify

INSIDE = Setup(batch=1, parallelism="data-parallel-loss-inside")


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13, 16, 17, 31, 100])
def test_the_small_batch_is_dealt_like_the_real_one(replicas: int) -> None:
    for batch in range(1, 120):
        setup = replace(INSIDE, batch=batch, ranks_per_node=replicas)
        small, said = scaled_down(setup)
        assert explain(small).is_multiple == explain(setup).is_multiple
        all_busy = len(setup.replica_sizes) == setup.replicas
        assert (len(small.replica_sizes) == small.replicas) == all_busy
        assert small.batch <= batch
        assert (f"batch {small.batch} instead of {batch}" in said) == (small.batch != batch)


@pytest.mark.self_check
@pytest.mark.parametrize(("replicas", "batch"), [(9, 9), (10, 20), (16, 20), (9, 17), (12, 13)])
def test_more_replicas_than_run_here_are_verified_as_what_was_said(
    replicas: int, batch: int
) -> None:
    right = explain(replace(INSIDE, batch=batch, ranks_per_node=replicas))
    found = verify(right)
    assert found.outcome == "agrees", found
    assert explain(found.setup).is_multiple == right.is_multiple
    assert found.comparisons[0].predicted.startswith("no multiple") is not right.is_multiple


@pytest.mark.self_check
def test_unequal_counts_are_verified_with_no_more_examples_than_can_be_told_apart() -> None:
    setup = Setup(
        batch=64,
        nodes=4,
        ranks_per_node=8,
        loss="token-mean",
        accumulation=16,
        accumulation_divided=True,
    )
    found = verify(explain(setup))
    assert found.outcome == "agrees", found
    assert found.setup.effective_batch <= MOST_TOLD_APART
    assert found.setup.accumulation == 2
