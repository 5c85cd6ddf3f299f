"""What every rank of the script does, from its start to the exit code that all share."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_equivalence.report.script.skeleton.comparison import compare, print_table
from ddp_equivalence.report.script.skeleton.placeholders import (
    Gradients,
    on_one_device,
    on_this_rank,
)
from ddp_equivalence.report.script.skeleton.start import start


def on_cpu(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().to_dense().cpu()


def main() -> None:
    if "RANK" not in os.environ:
        print(__doc__)
        sys.exit(2)
    rank = start()
    group = dist.new_group(backend="gloo")  # the table travels on the CPU
    big: Gradients = {}
    single: Gradients = {}
    if rank.rank == 0:
        big = {name: on_cpu(one) for name, one in on_one_device(torch.float64).items()}
        # The scale changes nothing but the rounding.
        single = {name: on_cpu(one) for name, one in on_one_device(None, scale=3.0).items()}
    found = {name: on_cpu(one) for name, one in on_this_rank(rank).items()}
    everyone: list[Any] | None = [None] * rank.world_size if rank.rank == 0 else None
    dist.gather_object(found, everyone, group=group)
    different = [False]
    if everyone is not None:
        names = dict.fromkeys([*big, *(name for one in everyone for name in one)])
        different = [print_table({name: compare(name, everyone, big, single) for name in names})]
    dist.broadcast_object_list(different, group=group)
    sys.stdout.flush()
    # All at once, and nothing that is freed on the way waits for another rank.
    os._exit(int(different[0]))
