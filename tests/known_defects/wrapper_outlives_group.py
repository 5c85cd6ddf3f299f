"""A DDP wrapper that outlives its gloo group hangs when it is freed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from tests.known_defects.defect import Batch, KnownDefect, squares

TIMES = 20
"""It does not hang every time."""


def step(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """Groups are destroyed before the wrapper that uses them is freed."""
    for _ in range(TIMES):
        model.zero_grad()
        group = dist.new_group()
        ddp = DistributedDataParallel(model, process_group=group)
        squares(ddp, batch).backward()
        dist.all_reduce(torch.ones(100), group=group)  # its thread has just worked
        dist.destroy_process_group(group)
        del group
        del ddp


DEFECT = KnownDefect(
    name="wrapper_outlives_group",
    says="a DDP wrapper that outlives its gloo group often hangs when it is freed: it holds "
    "Python's global lock, and waits for a thread of the group that needs it",
    step=step,
    outcome="unknown",
    words="still running",
    deadline=10.0,
    upstream=("https://github.com/pytorch/pytorch/issues/56297",),
    seen_in=("2.11.0", "2.12.1", "2.13.0"),
    fixed_in="2.14.1",
    instead="delete the wrapper before the group, or keep the group until the process ends",
)
