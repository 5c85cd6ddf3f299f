"""How faults get into DistributedDataParallel: as its communication hook, or after it is made."""

# No "from __future__ import annotations": DDP compares a hook's annotations with classes, not text.

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.faults.fault import Fire

Reduce = Callable[[GradBucket], Tensor]
"""What a broken reduction leaves of a bucket."""


@contextmanager
def reducing(fire: Fire, reduce: Reduce) -> Iterator[None]:
    """Every DDP made inside reduces like this, whatever hook is registered later."""

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        fire()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(reduce(bucket))
        return future

    register = DistributedDataParallel.register_comm_hook

    def after(ddp: Any) -> None:
        register(ddp, None, hook)

    def ignore(ddp: Any, state: object, hook: object) -> None:
        """The fault is the hook."""

    with (
        after_making(after),
        patch.object(DistributedDataParallel, "register_comm_hook", ignore),
    ):
        yield


@contextmanager
def after_making(change: Callable[[Any], None], **arguments: Any) -> Iterator[None]:
    """Every DDP made inside is made with these ``arguments`` and then changed."""
    initialise = DistributedDataParallel.__init__

    def making(ddp: Any, module: nn.Module, *given: Any, **named: Any) -> None:
        initialise(ddp, module, *given, **(named | arguments))
        change(ddp)

    with patch.object(DistributedDataParallel, "__init__", making):
        yield


@contextmanager
def calling(change: Callable[..., Any]) -> Iterator[None]:
    """Calls of every DDP go through ``change(ddp, call, *arguments, **named)``."""
    forward = DistributedDataParallel.forward

    def called(ddp: Any, *arguments: Any, **named: Any) -> Any:
        return change(ddp, partial(forward, ddp), *arguments, **named)

    with patch.object(DistributedDataParallel, "forward", called):
        yield


def summed(values: Tensor) -> Tensor:
    """Added over all ranks, in place."""
    dist.all_reduce(values)
    return values


def averaged(values: Tensor) -> Tensor:
    """Averaged over all ranks, in place, as DDP does."""
    return summed(values).div_(dist.get_world_size())
