"""The wrapper that runs forward is freed before backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.faults.fault import Fault, Fire


@contextmanager
def freed_early(fire: Fire) -> Iterator[None]:
    """Each call goes through a new wrapper, which is freed when it returns."""
    call = DistributedDataParallel.__call__

    def through_another(ddp: Any, *arguments: Any, **named: Any) -> Any:
        another = DistributedDataParallel(ddp.module)
        outputs = call(another, *arguments, **named)
        fire()
        return outputs  # and nobody holds the wrapper any more

    with patch.object(DistributedDataParallel, "__call__", through_another):
        yield


FAULT = Fault(
    name="wrapper_dropped",
    sentence="A call goes through a wrapper that nobody holds until backward.",
    in_torch=freed_early,
)
