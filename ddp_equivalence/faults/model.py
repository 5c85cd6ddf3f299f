"""The model or the loss makes the difference, not the reduction: statistics, draws, buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence.faults.changed_ddp import (
    after_ddp_init,
    around_ddp_forward,
    multiply_by_random_numbers,
)
from ddp_equivalence.faults.fault import Fault, RecordFiring

# Batch norm uses the statistics of the rank's shard. Nothing has to be broken for that.


@contextmanager
def record_batch_norm(record_firing: RecordFiring) -> Iterator[None]:
    """Change nothing, and record that batch norm ran in training mode."""
    batch_norm: Any = nn.modules.batchnorm._BatchNorm
    forward = batch_norm.forward

    def watched(module: Any, inputs: Any) -> Any:
        if module.training:
            record_firing()
        return forward(module, inputs)

    with patch.object(batch_norm, "forward", watched):
        yield


BATCH_NORM_LOCAL_STATISTICS = Fault(
    name="batch_norm_local_statistics",
    sentence="Batch norm takes the statistics of the rank's own shard, as torch does by default.",
    break_torch=record_batch_norm,
    strategies=("ddp_mean",),
    pairs=(("batch_norm", "mse_mean"), ("batch_norm", "cross_entropy_mean")),
    strategy_differs_anyway=True,
    own_step="of_batch_norm",
    acts_at=("forward",),
)


# All ranks except rank 0 change the buffers of the model, and nothing makes them equal again.


def change_buffers(record_firing: RecordFiring) -> Any:
    """On all ranks except 0, multiply every buffer by random numbers from 0.5 to 1.5."""

    def change(ddp: Any) -> None:
        ddp.broadcast_buffers = False
        if dist.get_rank() == 0:
            return
        multiply_by_random_numbers(ddp.module.buffers())
        record_firing()

    return after_ddp_init(change)


BUFFERS_DIFFER_BETWEEN_RANKS = Fault(
    name="buffers_differ_between_ranks",
    sentence="All ranks but 0 change the model's buffers, and DDP does not broadcast them.",
    break_torch=change_buffers,
    strategies=("ddp_mean",),
    pairs=(("odd_shapes", "mse_mean"), ("odd_shapes", "cross_entropy_mean")),
    own_step="of_buffers",
    acts_at=("wrap",),
)


# A contrastive loss is given the rank's shard only. Nothing has to be broken for that.


def record_calls(record_firing: RecordFiring) -> Any:
    """Change nothing, and record that DDP was called."""

    def change(ddp: Any, call: Any, *arguments: Any, **named: Any) -> Any:
        record_firing()
        return call(*arguments, **named)

    return around_ddp_forward(change)


of_ddp_as_it_is = partial(
    Fault,
    break_torch=record_calls,
    strategies=("ddp_mean",),
    strategy_differs_anyway=True,
    own_step="",
)

CONTRASTIVE_LOCAL_NEGATIVES = of_ddp_as_it_is(
    name="contrastive_local_negatives",
    sentence="The contrastive loss takes its negatives from the rank's own shard.",
    pairs=(("mlp", "contrastive"), ("conv", "contrastive")),
)


# A penalty on batch statistics is given the rank's shard. Nothing has to be broken for that.


BATCH_STATISTICS_LOCAL = of_ddp_as_it_is(
    name="batch_statistics_local",
    sentence="The penalty takes the variance of the outputs of the rank's own shard.",
    pairs=(("mlp", "batch_statistics"),),
)


# Each rank draws its dropout masks with a seed of its own.


SEED = 1234


def seed_before_forward(record_firing: RecordFiring, by_rank: bool) -> Any:
    """Set the seed before every forward pass: one for each rank, or the same on all."""

    def change(ddp: Any, call: Any, *arguments: Any, **named: Any) -> Any:
        if dist.get_world_size() > 1:
            torch.manual_seed(SEED + (dist.get_rank() if by_rank else 0))
            record_firing()
        return call(*arguments, **named)

    return around_ddp_forward(change)


DROPOUT_DIFFERS_FROM_REFERENCE = Fault(
    name="dropout_differs_from_reference",
    sentence="Every rank seeds its generator with a seed of its own before the forward pass.",
    break_torch=lambda record_firing: seed_before_forward(record_firing, by_rank=True),
    strategies=("ddp_mean",),
    pairs=(("dropout", "mse_mean"), ("dropout", "cross_entropy_mean")),
    strategy_differs_anyway=True,
    own_step="of_dropout",
    acts_at=("forward",),
)


# All ranks draw the same dropout masks.


DROPOUT_SAME_ON_ALL_RANKS = Fault(
    name="dropout_same_on_all_ranks",
    sentence="Every rank seeds its generator with the same seed before the forward pass.",
    break_torch=lambda record_firing: seed_before_forward(record_firing, by_rank=False),
    strategies=("ddp_mean",),
    pairs=(("dropout", "mse_mean"), ("dropout", "cross_entropy_mean")),
    strategy_differs_anyway=True,
    own_step="of_dropout",
    acts_at=("forward",),
)
