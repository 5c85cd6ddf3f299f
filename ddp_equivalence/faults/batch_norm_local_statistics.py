"""Batch norm uses the statistics of the rank's shard. Nothing has to be broken for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

from ddp_equivalence.faults.fault import Fault, RecordFiring


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


FAULT = Fault(
    name="batch_norm_local_statistics",
    sentence="Batch norm takes the statistics of the rank's own shard, as torch does by default.",
    break_torch=record_batch_norm,
    strategies=("ddp_mean",),
    pairs=(("batch_norm", "mse_mean"), ("batch_norm", "cross_entropy_mean")),
    strategy_differs_anyway=True,
    own_step="of_batch_norm",
    acts_at=("forward",),
)
