"""The repository's own training step, compared with one big batch."""

from __future__ import annotations

import pytest
import torch
from ddp_equivalence import Case, NotEquivalent, Rank
from ddp_equivalence.pytest_plugin import Equivalence
from torch import Tensor, nn

from training import build_model, load_cars, loss_function, training_step

case = Case(
    model=build_model,
    batch=lambda generator: load_cars(),
    loss=loss_function,
    layout="1x2",
)


def my_step(model: nn.Module, shard: Tensor, rank: Rank) -> None:
    training_step(model, torch.optim.SGD(model.parameters(), lr=0.01), shard)


def step_without_averaging(model: nn.Module, shard: Tensor, rank: Rank) -> None:
    loss_function(model, shard).backward()


def test_the_training_step_gives_the_gradients_of_one_big_batch(equivalence: Equivalence) -> None:
    equivalence.assert_equivalent(case, my_step)


def test_a_step_that_forgets_to_average_is_caught(equivalence: Equivalence) -> None:
    with pytest.raises(NotEquivalent) as caught:
        equivalence.assert_equivalent(case, step_without_averaging)
    assert caught.value.verdict.cause == "no_all_reduce"
