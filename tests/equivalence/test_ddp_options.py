"""DDP with its options, and without its wrapper, where the promise holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, assert_equivalent
from ddp_equivalence.strategies.catalogue import Trial
from ddp_equivalence.strategies.power_sgd import WHOLE_STEPS


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


def test_power_sgd_is_right_as_long_as_it_reduces_whole_gradients() -> None:
    case = Case(model="mlp", loss="mse_mean", layout="1x2")
    assert_equivalent(case, "power_sgd", steps=WHOLE_STEPS)


@pytest.mark.promise_of("sync_batch_norm")
def test_sync_batch_norm_gives_the_gradients_of_one_big_batch(trial: Trial) -> None:
    assert_equivalent(trial.case, trial.strategy, **trial.options)


def low_rank(model: nn.Module, rank: Rank) -> Callable[[Any], None]:
    """PowerSGD from the third step on, with the rank of the largest matrix, for all matrices."""
    ddp = DistributedDataParallel(model)
    state = PowerSGDState(
        None, matrix_approximation_rank=11, start_powerSGD_iter=2, min_compression_rate=0
    )
    ddp.register_comm_hook(state, powerSGD_hook)

    def step(shard: Any) -> None:
        nn.functional.mse_loss(ddp(shard["inputs"]), shard["targets"]).backward()

    return step


def test_power_sgd_is_right_with_the_rank_of_the_matrices() -> None:
    assert_equivalent(Case(model="mlp", loss="mse_mean", layout="1x2"), low_rank, steps=4)
