"""The DDP that runs the forward pass is freed before backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.faults.fault import Fault, RecordFiring


@contextmanager
def free_wrapper_early(record_firing: RecordFiring) -> Iterator[None]:
    """Each call of DDP goes through a new DDP, which is freed when the call returns."""
    call = DistributedDataParallel.__call__

    def through_another(ddp: Any, *arguments: Any, **named: Any) -> Any:
        another = DistributedDataParallel(ddp.module)
        outputs = call(another, *arguments, **named)
        record_firing()
        return outputs  # Here nobody holds the new DDP any more, so it is freed.

    with patch.object(DistributedDataParallel, "__call__", through_another):
        yield


FAULT = Fault(
    name="wrapper_dropped",
    sentence="Each call goes through a new DDP wrapper, which is freed before backward.",
    break_torch=free_wrapper_early,
    acts_at=("forward",),
)
