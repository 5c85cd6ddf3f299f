"""Experiments trained side by side end like each one alone, in one process and on ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.sandbox.training import (
    BLOCK_SIZE,
    SAMPLES,
    Block,
    BlockResult,
    Problem,
    batches,
    joined,
    multi,
    single,
    train,
)
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.warm_ranks import on_ranks

ROUNDING = 1e-14


def one_at_a_time(rank: Rank, block: Block) -> NDArray[np.float64]:
    """Each experiment as somebody would write it: its own net, wrapper, loss and optimizer."""
    weights = []
    for experiment in block.experiments:
        net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(net.weight)
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=block.problem.lr)
        for inputs, targets in batches(block.problem, range(experiment, experiment + 1), rank.rank):
            optimizer.zero_grad()
            nn.L1Loss()(ddp(inputs), targets).backward()
            optimizer.step()
        weights.append(net.weight.item())
        del ddp
    return np.array(weights)


def test_neurons_side_by_side_end_where_each_ends_alone_through_ddp() -> None:
    block = Block(Problem(lr=1e-2, batch_size=32, ranks=2, n_experiments=200), range(200))
    together, alone = multi(block), on_ranks("1x2", one_at_a_time, block)
    for rank in (0, 1):
        assert np.abs(together[rank].weights - alone[rank]).max() < ROUNDING
    assert together[0].weights.std() > 1e-4  # they are different experiments


def test_one_process_and_eight_ranks_see_the_same_examples_and_end_the_same() -> None:
    of_ranks = train(Problem(lr=1e-3, batch_size=16, ranks=8, n_experiments=300))
    alone = train(Problem(lr=1e-3, batch_size=128, n_experiments=300))
    assert np.abs(of_ranks.weights - alone.weights).max() < ROUNDING
    assert of_ranks.spread == 0.0
    assert of_ranks.variance == pytest.approx(alone.variance, rel=1e-12)


def test_ranks_that_call_the_bare_net_drift_apart_and_the_mean_does_not_show_it() -> None:
    problem = Problem(lr=1e-3, batch_size=16, ranks=8, n_experiments=300)
    drifted, alone = train(problem, as_published=True), train(problem)
    assert drifted.spreads.min() > 1e-4
    assert abs(drifted.w - alone.w) < 1e-4
    assert drifted.variance == pytest.approx(alone.variance, rel=0.01)
    assert drifted.deviation > 2 * alone.deviation


def test_an_experiment_sees_the_same_whoever_is_beside_it() -> None:
    problem = Problem(lr=1e-3, batch_size=SAMPLES)
    (inputs, targets), (some, of_some) = (
        next(batches(problem, experiments)) for experiments in (range(40), range(17, 23))
    )
    assert torch.equal(inputs[:, 17:23], some)
    assert torch.equal(targets[:, 17:23], of_some)
    other = next(batches(problem, range(BLOCK_SIZE, BLOCK_SIZE + 40)))[0]
    assert not torch.isclose(inputs, other).any()


def test_epochs_and_seeds_have_noise_of_their_own() -> None:
    problem = Problem(lr=1e-3, batch_size=SAMPLES, n_epochs=2)
    first, second = (inputs for inputs, _ in batches(problem, range(10)))
    other = next(batches(Problem(lr=1e-3, batch_size=SAMPLES, seed=1), range(10)))[0]
    assert not torch.isclose(first, second).any()
    assert not torch.isclose(first, other).any()


def test_blocks_joined_have_the_moments_of_all_experiments() -> None:
    problem = Problem(lr=1e-3, batch_size=64, n_experiments=90)
    whole = joined([{0: single(problem, range(90))}])
    parts = joined(
        [{0: single(problem, part)} for part in (range(20), range(20, 21), range(21, 90))]
    )
    assert np.array_equal(parts.weights, whole.weights)
    assert parts.variance == pytest.approx(whole.variance, rel=1e-12)
    steps = np.concatenate([single(problem, range(at, at + 1)).step_means for at in range(90)])
    assert whole.variance == pytest.approx(steps.var(ddof=1), rel=1e-12)


def test_equal_steps_have_no_variance_at_all() -> None:
    found = train(Problem(lr=1e-3, batch_size=16, deterministic=True, n_experiments=1001))
    assert (found.variance, found.deviation) == (0.0, 0.0)
    assert found.w == pytest.approx(0.984, abs=1e-12)


def dies_on_rank_1(rank: Rank, block: Block) -> BlockResult:
    if rank.rank == 1:
        raise RuntimeError("the noise ran out")
    return BlockResult(np.ones(1), np.ones(1), np.ones(1))


def test_a_rank_that_fails_is_named() -> None:
    block = Block(Problem(lr=1e-3, batch_size=32, ranks=2), range(10))
    with pytest.raises(RankFailed, match=r"rank 1 .*the noise ran out"):
        multi(block, dies_on_rank_1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("lr", float("nan")),
        ("batch_size", 0),
        ("batch_size", 48),
        ("batch_size", 64),
        ("ranks", 3),
        ("n_epochs", 0),
        ("n_experiments", 1),
        ("seed", -1),
    ],
)
def test_a_setup_that_cannot_run_is_refused_by_name(field: str, value: float) -> None:
    right: dict[str, object] = {"lr": 1e-3, "batch_size": 16, "ranks": 8}
    with pytest.raises(BadCase) as caught:
        Problem(**(right | {field: value}))  # type: ignore[arg-type]
    assert caught.value.field == field
