"""Batch norm sees the shard only: nothing has to be broken for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

from ddp_equivalence.faults.fault import Fault, Fire


@contextmanager
def as_it_comes(fire: Fire) -> Iterator[None]:
    """Nothing changes: it is only told that batch norm ran in training mode."""
    kind: Any = nn.modules.batchnorm._BatchNorm
    forward = kind.forward

    def watched(module: Any, inputs: Any) -> Any:
        if module.training:
            fire()
        return forward(module, inputs)

    with patch.object(kind, "forward", watched):
        yield


FAULT = Fault(
    name="batch_norm_local_statistics",
    sentence="Batch norm takes the statistics of the rank's own shard, as it comes.",
    in_torch=as_it_comes,
    strategies=("ddp_mean",),
    pairs=(("batch_norm", "mse_mean"), ("batch_norm", "cross_entropy_mean")),
    by_design=True,
)
