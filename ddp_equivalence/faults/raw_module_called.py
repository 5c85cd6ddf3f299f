"""Calls of DDP go directly to the module inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.faults.fault import Fault, RecordFiring


@contextmanager
def call_module(record_firing: RecordFiring) -> Iterator[None]:
    """A call of DDP calls its module, so that DDP prepares no all-reduce."""

    def call(ddp: Any, *arguments: Any, **named: Any) -> Any:
        record_firing()
        return ddp.module(*arguments, **named)

    with patch.object(DistributedDataParallel, "__call__", call):
        yield


FAULT = Fault(
    name="raw_module_called",
    sentence="A call of DistributedDataParallel calls the module in it instead.",
    break_torch=call_module,
    acts_at=("forward",),
)
