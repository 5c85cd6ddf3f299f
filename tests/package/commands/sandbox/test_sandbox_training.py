"""The toy problem trains as somebody would write it, and its closed form is right."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from ddp_equivalence.commands.sandbox.training import (
    SAMPLES,
    Array,
    Problem,
    batches,
    closed_form,
    gradient,
    train,
)
from ddp_equivalence.ranks.warm_ranks import on_ranks

ROUNDING = 1e-14
EIGHT_RANKS = Problem(lr=1e-3, batch_size=16, ranks=8, n_experiments=300)


def one_at_a_time(rank: Rank, problem: Problem) -> Array:
    """Each experiment as somebody would write it: its own net, wrapper, loss and optimizer."""
    weights = []
    for experiment in range(problem.n_experiments):
        net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(net.weight)
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=problem.lr)
        for batch in batches(problem, rank.rank):
            inputs, targets = (one[:, [experiment]] for one in batch.values())
            optimizer.zero_grad()
            nn.L1Loss()(ddp(inputs), targets).backward()
            optimizer.step()
        weights.append(net.weight.item())
        del ddp
    return np.array(weights)


def test_neurons_side_by_side_end_where_each_ends_alone_through_ddp() -> None:
    problem = Problem(lr=1e-2, batch_size=32, ranks=2, n_experiments=20)
    together, alone = train(problem), np.stack(on_ranks("1x2", one_at_a_time, problem))
    assert np.abs(together.weights - alone).max() < ROUNDING
    assert together.weights.std() > 1e-4  # they are different experiments


def test_one_process_and_eight_ranks_see_the_same_examples_and_end_the_same() -> None:
    of_ranks = train(EIGHT_RANKS)
    alone = train(Problem(lr=1e-3, batch_size=128, n_experiments=300))
    assert np.abs(of_ranks.weights - alone.weights).max() < ROUNDING
    assert of_ranks.spreads.max() == 0.0
    assert of_ranks.variance == pytest.approx(alone.variance, rel=1e-12)
    assert of_ranks.path[-1] == pytest.approx(of_ranks.w, abs=ROUNDING)


def test_ranks_that_call_the_bare_net_drift_apart_and_the_mean_does_not_show_it() -> None:
    drifted, alone = train(EIGHT_RANKS, as_published=True), train(EIGHT_RANKS)
    assert drifted.spreads.min() > 1e-4
    assert abs(drifted.w - alone.w) < 1e-4
    assert drifted.variance == pytest.approx(alone.variance, rel=0.01)
    assert drifted.deviation > 2 * alone.deviation


def test_epochs_and_seeds_have_noise_of_their_own() -> None:
    problem = Problem(lr=1e-3, batch_size=SAMPLES, n_epochs=2, n_experiments=10)
    first, second = (batch["inputs"] for batch in batches(problem))
    other = next(batches(Problem(lr=1e-3, batch_size=SAMPLES, n_experiments=10, seed=1)))["inputs"]
    assert not torch.isclose(first, second).any()
    assert not torch.isclose(first, other).any()


def test_equal_steps_have_no_variance_at_all() -> None:
    found = train(Problem(lr=1e-3, batch_size=16, deterministic=True, n_experiments=1001))
    assert (found.variance, found.deviation) == (0.0, 0.0)
    assert found.w == pytest.approx(0.984, abs=1e-12)


@pytest.mark.parametrize("w", [1.0, 0.3, -0.7, 0.0])
def test_the_gradient_has_the_mean_that_integration_gives_and_its_derivative(w: float) -> None:
    normal, places, off = NormalDist(), 4000, 1e-5
    width = 20 / places
    integrated = width * math.fsum(
        x * (2 * normal.cdf(w * x) - 1) * normal.pdf(x - 1)
        for x in (-9 + width * place for place in range(places + 1))
    )
    mean, slope = gradient(w)
    assert mean == pytest.approx(integrated, abs=1e-9)
    assert slope == pytest.approx((gradient(w + off)[0] - gradient(w - off)[0]) / (2 * off))


def test_a_step_at_the_start_has_the_known_mean_and_variance() -> None:
    one_step = closed_form(Problem(lr=1e-3, batch_size=256))
    assert one_step.w == pytest.approx(1 - 1e-3 * 0.9599, abs=1e-8)
    assert one_step.variance == pytest.approx(1e-6 * 1.0786 / 256, rel=1e-4)


def test_without_noise_the_weight_turns_round_at_zero() -> None:
    expected = closed_form(Problem(lr=0.4, batch_size=64, deterministic=True, n_experiments=1))
    assert expected.path == pytest.approx((1.0, 0.6, 0.2, -0.2, 0.2))
    assert expected.variance == pytest.approx(0.16)  # -0.4 three times and 0.4 once
