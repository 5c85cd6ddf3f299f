"""A right step is the big batch for models that make it look wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, assert_equivalent
from ddp_equivalence.ranks.lanes import must_share
from tests.equivalence.plain_steps import (
    by_hand,
    ddp,
    ddp_that_leaves_buffers,
    ddp_that_looks_for_unused,
)
from tests.equivalence.small_regression import Batch, Model, loss, regression, two_batches
from tests.equivalence.unusual_models import (
    Branch,
    Checkpointed,
    KeysOfAttention,
    Mixed,
    UsedTwice,
    ZeroGradient,
    batch_norm,
    batch_norm_in_eval,
    dropout_in_eval,
    partly_frozen,
    with_two_that_branch,
)

LAYOUTS = ("2x2", "1+2")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [ddp, by_hand])
@pytest.mark.parametrize(
    "model",
    [
        UsedTwice,
        partly_frozen,
        ZeroGradient,
        batch_norm_in_eval,
        dropout_in_eval,
        KeysOfAttention,
        Checkpointed,
    ],
)
def test_a_right_step_is_the_big_batch_for_any_model(model: Model, step: Any, layout: str) -> None:
    assert_equivalent(regression(layout, model), step)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_that_most_ranks_do_not_use_are_no_fault(layout: str) -> None:
    case = regression(layout, Branch, batch=with_two_that_branch)
    assert_equivalent(case, ddp_that_looks_for_unused)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_that_are_not_broadcast_are_no_fault(layout: str) -> None:
    assert_equivalent(regression(layout, batch_norm_in_eval), ddp_that_leaves_buffers)


def trains_a_static_graph(model: nn.Module, joined: Batch, rank: Rank) -> None:
    """Train two steps of plain SGD under static_graph."""
    wrapped = DistributedDataParallel(model, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for half in range(2):
        optimizer.zero_grad()
        loss(wrapped, {key: values.chunk(2)[half] for key, values in joined.items()}).backward()
        optimizer.step()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_activation_checkpointing_in_a_static_graph_is_no_fault(layout: str) -> None:
    case = regression(layout, Checkpointed, batch=two_batches)
    assert_equivalent(case, trains_a_static_graph, compare="update", steps=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [ddp, by_hand])
def test_two_precisions_in_one_model_are_no_fault(step: Any, layout: str) -> None:
    assert_equivalent(regression(layout, Mixed, dtype=None), step)


def compiled(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """The compiler splits the graph at the ends of DDP's buckets; the sums stay the same."""
    wrapped: Any = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    loss(wrapped, shard).backward()


def test_a_compiled_model_is_no_fault() -> None:
    assert_equivalent(regression("1x2", dropout_in_eval), compiled)


def with_synchronised_statistics(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """SyncBatchNorm uses the statistics of all ranks, which are those of the big batch."""
    wrapped = DistributedDataParallel(
        nn.SyncBatchNorm.convert_sync_batchnorm(model), device_ids=[rank.device]
    )
    loss(wrapped, shard).backward()


def test_synchronised_batch_norm_is_no_fault() -> None:
    """On the CPU SyncBatchNorm raises an error, so gloo cannot replace NCCL here."""
    backend = "nccl_shared" if must_share(2) else "nccl"
    assert_equivalent(regression("1x2", batch_norm), with_synchronised_statistics, backend=backend)
