"""With the debug level DETAIL, DDP's constructor ends the process."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from tests.known_defects.defect import Batch, KnownDefect, squares


def step(model: nn.Module, batch: Batch, rank: Rank) -> None:
    """A wrapper on a group that was made with the debug level."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # no stubs
    ddp = DistributedDataParallel(model, process_group=dist.new_group())
    squares(ddp, batch).backward()


DEFECT = KnownDefect(
    name="debug_level_detail",
    says="with TORCH_DISTRIBUTED_DEBUG=DETAIL, DDP's constructor ends the process by a "
    "segmentation fault on gloo, where it writes the log of the construction",
    step=step,
    outcome="unknown",
    words="killed by SIGSEGV",
    seen_in=("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
    instead="use the level INFO, or replace torch.distributed.Logger.set_construction_data_and_log "
    "by a function that does nothing",
)
