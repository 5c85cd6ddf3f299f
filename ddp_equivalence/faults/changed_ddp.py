"""Change how DistributedDataParallel is made, is called and reduces, for faults that need it."""

# DDP compares the annotations of a hook with classes. So this file must not import annotations from
# __future__, which turns them into strings.

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.faults.fault import RecordFiring

Reduce = Callable[[GradBucket], Tensor]
"""A broken reduction: it takes a bucket and returns the gradients that DDP then holds for it."""


@contextmanager
def ddp_hook(record_firing: RecordFiring, reduce: Reduce) -> Iterator[None]:
    """Every DDP that is made inside the block reduces its buckets with ``reduce``.

    Hooks that other code registers later are ignored.
    """

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        record_firing()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(reduce(bucket))
        return future

    register = DistributedDataParallel.register_comm_hook

    def register_broken_hook(ddp: Any) -> None:
        register(ddp, None, hook)

    def ignore(ddp: Any, state: object, hook: object) -> None:
        """Register nothing: DDP takes only one hook, and it already has the broken one."""

    with (
        after_ddp_init(register_broken_hook),
        patch.object(DistributedDataParallel, "register_comm_hook", ignore),
    ):
        yield


@contextmanager
def after_ddp_init(change: Callable[[Any], None], **arguments: Any) -> Iterator[None]:
    """Every DDP that is made inside the block gets these ``arguments``, and is then changed."""
    initialise = DistributedDataParallel.__init__

    def initialise_and_change(ddp: Any, module: nn.Module, *given: Any, **named: Any) -> None:
        initialise(ddp, module, *given, **(named | arguments))
        change(ddp)

    with patch.object(DistributedDataParallel, "__init__", initialise_and_change):
        yield


@contextmanager
def around_ddp_forward(change: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, every DDP's forward is ``change(ddp, forward, *arguments, **named)``."""
    forward = DistributedDataParallel.forward

    def changed_forward(ddp: Any, *arguments: Any, **named: Any) -> Any:
        return change(ddp, partial(forward, ddp), *arguments, **named)

    with patch.object(DistributedDataParallel, "forward", changed_forward):
        yield


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    dist.all_reduce(values)
    return values


def all_reduce_mean(values: Tensor) -> Tensor:
    """The mean over all ranks, in place, as DDP computes it."""
    return all_reduce_sum(values).div_(dist.get_world_size())


def multiply_by_random_numbers(tensors: Iterable[Tensor]) -> None:
    """Multiply every element by a number from 0.5 to 1.5, another one on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for one in tensors:
            noise = torch.rand(one.shape, generator=generator, dtype=torch.float64)
            one.mul_((0.5 + noise).to(one))
