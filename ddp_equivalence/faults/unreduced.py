"""Gradients, or some of them, stay on their rank: nothing reduces them, or not what it should."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # no stubs
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.faults.changed_ddp import after_ddp_init, all_reduce_mean, ddp_hook
from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.strategy import Task, TrainStep

# DDP does not reduce one of its buckets, which has several parameters.


BUCKETS = 3
"""About how many buckets DDP makes. One of them is not reduced, and the others are right."""


@contextmanager
def leave_out_one_bucket(record_firing: RecordFiring) -> Iterator[None]:
    """DDP makes small buckets, and does not reduce the first one with several parameters."""
    # Without small buckets, DDP puts all parameters into one bucket in its first iteration.
    assign = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]  # no stubs

    def in_small_buckets(tensors: Any, limits: Any, *more: Any, **named: Any) -> Any:
        limit = sum(tensor.numel() * tensor.element_size() for tensor in tensors) // BUCKETS
        return assign(tensors, [max(1, limit)], *more, **named)

    left_out: list[int] = []

    def reduce_all_but_one(bucket: GradBucket) -> Tensor:
        values: Tensor = bucket.buffer()
        if bucket.index() == 0:
            left_out.clear()
        if left_out or len(bucket.parameters()) == 1:
            return all_reduce_mean(values)
        left_out.append(bucket.index())
        record_firing()
        return values

    def record_nothing() -> None:
        """The other buckets are reduced rightly, so the fault does not fire there."""

    with (
        patch.object(dist, "_compute_bucket_assignment_by_size", in_small_buckets),
        ddp_hook(record_nothing, reduce_all_but_one),
    ):
        yield


BUCKET_NOT_REDUCED = Fault(
    name="bucket_not_reduced",
    sentence="DDP's communication hook returns a bucket of several parameters unreduced.",
    break_torch=leave_out_one_bucket,
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean"), ("gru_tied", "token_mean")),
)


# DDP takes its graph for static, and a parameter is not used in the second step.


def leave_one_out(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that keeps the last parameter from DDP, except in the first call.

    The gradient of this parameter is reduced by hand, and is right.
    """
    devices = [task.rank.device] if task.rank.device.type == "cuda" else None
    ddp = DistributedDataParallel(task.model, device_ids=devices, static_graph=True)
    parameter = list(task.model.parameters())[-1]
    is_first = True

    def broken(shard: Any) -> None:
        nonlocal is_first
        if is_first:
            task.loss(ddp, shard).backward()
            is_first = False
            return
        parameter.requires_grad_(False)
        task.loss(ddp, shard).backward()
        parameter.requires_grad_(True)
        (gradient,) = torch.autograd.grad(task.loss(task.model, shard), [parameter])
        dist.all_reduce(gradient)
        parameter.grad = gradient / task.rank.world_size
        if task.rank.world_size > 1:
            record_firing()

    return broken


GRAPH_CHANGED = Fault(
    name="graph_changed",
    sentence="DDP has static_graph=True, and the second step leaves the last parameter out.",
    break_step=leave_one_out,
    strategies=("ddp_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    steps=2,
    own_step="",
)


# DDP's communication hook returns buckets without reducing them.


NO_ALL_REDUCE = Fault(
    name="no_all_reduce",
    sentence="DDP's communication hook returns every bucket without reducing it.",
    break_torch=lambda record_firing: ddp_hook(record_firing, lambda bucket: bucket.buffer()),
)


# DDP's gradient synchronisation is switched off when DDP is made, and stays off.


FLAG = "require_backward_grad_sync"


def switch_sync_off(record_firing: RecordFiring) -> Any:
    """Switch synchronisation off as soon as DDP is made; a script cannot switch it on again."""

    def change(ddp: Any) -> None:
        kind = type(ddp)
        stays_off = {FLAG: property(lambda self: False, lambda self, value: None)}
        ddp.__class__ = type(kind.__name__, (kind,), {**stays_off, "__module__": kind.__module__})
        record_firing()

    return after_ddp_init(change)


NO_SYNC_LEFT_ON = Fault(
    name="no_sync_left_on",
    sentence="no_sync is entered when DistributedDataParallel is made, and never left.",
    break_torch=switch_sync_off,
    strategies=("ddp_mean", "ddp_global_mean", "ddp_accumulation"),
    acts_at=("wrap",),
)


# DDP ignores one parameter, so that its gradient is not reduced.


@contextmanager
def ignore_first_parameter(record_firing: RecordFiring) -> Iterator[None]:
    """Every DDP with several parameters ignores the first one."""
    initialise = DistributedDataParallel.__init__

    def ignore_and_initialise(ddp: Any, module: nn.Module, *given: Any, **named: Any) -> None:
        first, *others = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if others:
            # A shared parameter has several names, and is ignored under all of them.
            named_parameters = module.named_parameters(remove_duplicate=False)
            names = [name for name, parameter in named_parameters if parameter is first]
            ddp._set_params_and_buffers_to_ignore_for_model(module, names)
            record_firing()
        initialise(ddp, module, *given, **named)

    with patch.object(DistributedDataParallel, "__init__", ignore_and_initialise):
        yield


PARAMETER_NOT_REDUCED = Fault(
    name="parameter_not_reduced",
    sentence="DistributedDataParallel is told to ignore the first parameter.",
    break_torch=ignore_first_parameter,
    acts_at=("wrap",),
)


# DDP averages the parameters of a bucket, and not its gradients.


def average_parameters(bucket: GradBucket) -> Tensor:
    """All-reduce the bucket's parameters, and return its gradients as they are."""
    for parameter in bucket.parameters():
        with torch.no_grad():
            all_reduce_mean(parameter.detach().clone())
    values: Tensor = bucket.buffer()
    return values


PARAMETERS_REDUCED_NOT_GRADIENTS = Fault(
    name="parameters_reduced_not_gradients",
    sentence="DDP's communication hook averages the parameters of a bucket, not its gradients.",
    break_torch=lambda record_firing: ddp_hook(record_firing, average_parameters),
)


# Calls of DDP go directly to the module inside it.


@contextmanager
def call_module(record_firing: RecordFiring) -> Iterator[None]:
    """A call of DDP calls its module, so that DDP prepares no all-reduce."""

    def call(ddp: Any, *arguments: Any, **named: Any) -> Any:
        record_firing()
        return ddp.module(*arguments, **named)

    with patch.object(DistributedDataParallel, "__call__", call):
        yield


RAW_MODULE_CALLED = Fault(
    name="raw_module_called",
    sentence="A call of DistributedDataParallel calls the module in it instead.",
    break_torch=call_module,
    acts_at=("forward",),
)


# A flat copy of the gradients is all-reduced, and nobody copies it back.


def reduce_a_flat_copy(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that averages a flat buffer, and forgets it."""

    def broken(shard: Any) -> None:
        task.loss(task.model, shard).backward()
        gradients = [
            parameter.grad for parameter in task.model.parameters() if parameter.grad is not None
        ]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= task.rank.world_size
        record_firing()

    return broken


REDUCED_BUFFER_NOT_USED = Fault(
    name="reduced_buffer_not_used",
    sentence="The step all-reduces a flat copy of the gradients, and does not copy it back.",
    break_step=reduce_a_flat_copy,
    strategies=("manual_all_reduce_mean",),
    own_step="",
)


# The DDP that runs the forward pass is freed before backward.


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


WRAPPER_DROPPED = Fault(
    name="wrapper_dropped",
    sentence="Each call goes through a new DDP wrapper, which is freed before backward.",
    break_torch=free_wrapper_early,
    acts_at=("forward",),
)
