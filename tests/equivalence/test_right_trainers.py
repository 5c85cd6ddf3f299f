"""Right training loops and samplers that look like known faults: none may be called a fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from ddp_equivalence import Rank, assert_equivalent
from tests.equivalence.small_regression import EXAMPLES, Step, loss, name, regression, two_batches


def two_steps(ddp: nn.Module, optimizer: torch.optim.Optimizer, joined: Any) -> None:
    """Train a step on each half of ``joined``, which holds the shards of two steps."""
    for half in range(2):
        optimizer.zero_grad()
        batch = {key: values.chunk(2)[half] for key, values in joined.items()}
        loss(ddp, batch).backward()
        optimizer.step()


def trains_a_static_graph(model: nn.Module, joined: Any, rank: Rank) -> None:
    """From the second iteration on, DDP uses the order of the first iteration."""
    ddp = DistributedDataParallel(model, static_graph=True)
    two_steps(ddp, torch.optim.SGD(model.parameters(), lr=0.1), joined)


def trains_with_bucket_views_and_zeros(model: nn.Module, joined: Any, rank: Rank) -> None:
    """DDP rebuilds its buckets after the first iteration, while gradients are views of them."""
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.0001)
    two_steps(ddp, torch.optim.SGD(model.parameters(), lr=0.1), joined)


def trains_with_a_scaler(model: nn.Module, joined: Any, rank: Rank) -> None:
    """The scaler unscales the gradients before the optimizer's step."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=4096.0)
    for half in range(2):
        optimizer.zero_grad()
        batch = {key: values.chunk(2)[half] for key, values in joined.items()}
        scaler.scale(loss(ddp, batch)).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("layout", ["2x2", "1+2"])
@pytest.mark.parametrize(
    "trainer",
    [trains_a_static_graph, trains_with_bucket_views_and_zeros, trains_with_a_scaler],
    ids=name,
)
def test_a_right_trainer_moves_as_the_big_batch_does(trainer: Step, layout: str) -> None:
    assert_equivalent(regression(layout, batch=two_batches), trainer, compare="update", steps=2)


def with_a_sampler(model: nn.Module, everything: Any, rank: Rank) -> None:
    """The sampler shuffles, but it gives every example to exactly one rank."""
    ddp = DistributedDataParallel(model)
    sampler: DistributedSampler[int] = DistributedSampler(
        range(EXAMPLES),  # type: ignore[arg-type]
        rank.world_size,
        rank.rank,
        shuffle=True,
        seed=5,
    )
    mine = torch.tensor(list(sampler))
    loss(ddp, {key: values[mine] for key, values in everything.items()}).backward()


@pytest.mark.parametrize("layout", ["2x2", "1+2"])
def test_a_sampler_that_shuffles_is_the_big_batch(layout: str) -> None:
    assert_equivalent(regression(layout, shards="own"), with_a_sampler)
