"""DDP takes its graph for static, and a parameter is not used in the second step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.strategies.strategy import Task, TrainStep


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


FAULT = Fault(
    name="graph_changed",
    sentence="DDP has static_graph=True, and the second step leaves the last parameter out.",
    break_step=leave_one_out,
    strategies=("ddp_mean",),
    pairs=(("mlp", "mse_mean"), ("conv", "cross_entropy_mean")),
    steps=2,
    own_step="",
)
