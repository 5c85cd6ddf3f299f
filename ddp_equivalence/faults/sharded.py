"""Sharded models are clipped by the norm of a shard, or their gradients never reach the shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.case.build import untie
from ddp_equivalence.faults.clipping import SHARE_OF_LARGEST_NORM
from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere
from ddp_equivalence.strategies.strategy import Task, TrainStep

ON_A_PERCEPTRON: dict[str, Any] = {"pairs": (("mlp", "mse_mean"),), "own_step": ""}
SHARDED = ON_A_PERCEPTRON | {"strategies": ("fsdp2",)}


# Each rank clips its shards by the norm of these.

ADDED = 1e-6
"""To the norm that is divided by, as torch does: a rank may have no shard of a small model."""


def clip_shards(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that clips what ``to_local`` gives."""

    def broken(shard: Any) -> None:
        step(shard)
        found: list[Any] = [one.grad for one in task.model.parameters() if one.grad is not None]
        local = [one.to_local() for one in found]
        norm = torch.nn.utils.get_total_norm(local).detach()
        most = norm.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        for one in local:
            one.mul_((SHARE_OF_LARGEST_NORM * most / (norm + ADDED)).clamp(max=1.0))
        if task.rank.world_size > 1:
            record_firing()

    return broken


LOCAL_NORM_CLIPPED = Fault(
    name="local_norm_clipped",
    sentence="The shards of each rank are clipped by the norm of these shards.",
    break_step=clip_shards,
    **SHARDED,
)


# The squares of replicated parameters are added up over the ranks.


def count_biases_on_every_rank(
    task: Task, step: TrainStep, record_firing: RecordFiring
) -> TrainStep:
    """A step that clips by a norm to which every rank has added the squares of biases."""

    def broken(shard: Any) -> None:
        step(shard)
        found = [one.grad for one in task.model.parameters() if one.grad is not None]
        squares = sum(float(one.square().sum()) for one in found if one.ndim > 1)
        of_biases = torch.zeros((), dtype=torch.float64, device=task.rank.device)
        for one in found:
            if one.ndim == 1:
                of_biases += one.square().sum()
        dist.all_reduce(of_biases)
        norm = torch.tensor(squares + float(of_biases), dtype=torch.float64).sqrt()
        clip_grads_with_norm_(task.model.parameters(), SHARE_OF_LARGEST_NORM * float(norm), norm)
        if task.rank.world_size > 1:
            record_firing()

    return broken


REPLICATED_NORM_COUNTED_TWICE = Fault(
    name="replicated_norm_counted_twice",
    sentence="The norm by which gradients are clipped has the squares of the biases of every rank.",
    break_step=count_biases_on_every_rank,
    strategies=("manual_all_reduce_mean",),
    **ON_A_PERCEPTRON,
)


# FSDP does not reduce the second of two micro-batches.


def leave_sync_off(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that switches the reduction off after the first micro-batch."""
    dims = task.case.batch_dims

    def broken(shard: Any) -> None:
        model: Any = task.model
        count = count_examples(shard, dims)
        halves = [range(count // 2), range(count // 2, count)]
        for number, half in enumerate(halves):
            model.set_requires_gradient_sync(number == 0)
            (task.loss(model, take(shard, tuple(half), dims)) / len(halves)).backward()
        record_firing()

    return broken


GRADIENT_SYNC_OFF = Fault(
    name="gradient_sync_off",
    sentence="set_requires_gradient_sync(False) is in force for the second of two micro-batches.",
    break_step=leave_sync_off,
    **SHARDED,
)


# FSDP is told to ignore a parameter, or to reduce in a narrower type.


@contextmanager
def sharding_with(record_firing: RecordFiring, change: Any) -> Iterator[None]:
    """``fully_shard`` gets what ``change(module)`` adds to its arguments."""
    from torch.distributed import fsdp  # which takes half a second to import

    shard = fsdp.fully_shard

    @wraps(shard)
    def changed(module: nn.Module, **options: Any) -> Any:
        options |= change(module)
        if dist.get_world_size() > 1:
            record_firing()
        return shard(module, **options)

    with patch.object(fsdp, "fully_shard", changed):
        yield


def first_parameter(module: nn.Module) -> dict[str, Any]:
    """The first parameter, unless it has been sharded already."""
    first = next(iter(module.parameters()))
    return {"ignored_params": {first}} if type(first) is nn.Parameter else {}


IGNORED_PARAMETER = Fault(
    name="ignored_parameter",
    sentence="fully_shard is told to ignore the first parameter of each layer.",
    break_torch=lambda record_firing: sharding_with(record_firing, first_parameter),
    **SHARDED,
)


def in_bfloat16(_: nn.Module) -> dict[str, Any]:
    """A policy that reduces in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}


REDUCE_DTYPE = Fault(
    name="reduce_dtype",
    sentence="fully_shard is told to reduce in bfloat16.",
    break_torch=lambda record_firing: sharding_with(record_firing, in_bfloat16),
    **SHARDED,
)


# The loss calls the forward method of a module that was given to replicate.


def bypass_hooks(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that calls ``forward`` and not the module."""

    def broken(shard: Any) -> None:
        task.loss(task.model.forward, shard).backward()  # type: ignore[arg-type]
        if task.rank.world_size > 1:
            record_firing()

    return broken


REPLICATED_MODULE_NOT_CALLED = Fault(
    name="replicated_module_not_called",
    sentence="The loss calls the forward method of the replicated module, and not the module.",
    break_step=bypass_hooks,
    strategies=("replicate",),
    **ON_A_PERCEPTRON,
)


# Weights that the model ties are weights of their own during the step.


def part_tied_weights(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step in which each place of a tied weight has a copy."""

    def broken(shard: Any) -> None:
        parted = untie(task.model)
        try:
            step(shard)
            record_firing()
        finally:
            for module, key, weight in parted:
                module._parameters[key] = weight

    return broken


TIED_WEIGHTS_PARTED = Fault(
    name="tied_weights_parted",
    sentence="Each place of a tied weight has a copy of it while the step runs.",
    break_step=part_tied_weights,
    why_it_cannot_show=shows_everywhere,
    strategies=("ddp_global_mean",),
    pairs=(("gru_tied", "token_mean"),),
    own_step="",
)
