"""Calls go past the wrapper to the module in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.faults.fault import Fault, Fire


@contextmanager
def past_the_wrapper(fire: Fire) -> Iterator[None]:
    """Calls of a wrapper reach the module without it."""

    def call(ddp: Any, *arguments: Any, **named: Any) -> Any:
        fire()
        return ddp.module(*arguments, **named)

    with patch.object(DistributedDataParallel, "__call__", call):
        yield


FAULT = Fault(
    name="raw_module_called",
    sentence="A call of DistributedDataParallel calls the module in it instead.",
    in_torch=past_the_wrapper,
)
