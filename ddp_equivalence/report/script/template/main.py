"""The main function of the script, which every rank calls."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.report.script.template.comparison import compare, print_table
from ddp_equivalence.report.script.template.placeholders import (
    Gradients,
    on_one_device,
    on_this_rank,
)
from ddp_equivalence.report.script.template.process_group import join_process_group


def on_cpu(gradients: Gradients) -> Gradients:
    present = {name: each for name, each in gradients.items() if each is not None}
    return {**gradients, **{name: each.detach().to_dense().cpu() for name, each in present.items()}}


def main() -> None:
    """Rank 0 compares and prints; every rank exits with the result of rank 0."""
    if "RANK" not in os.environ:
        print(__doc__)
        sys.exit(2)
    rank = join_process_group()
    cpu_group = dist.new_group(backend="gloo")
    compares = rank.rank == 0
    expected = on_cpu(on_one_device(torch.float64)) if compares else {}
    # The loss is scaled by 3 and the gradients are divided by 3: only the rounding changes.
    rounded = on_cpu(on_one_device(None, scale=3.0)) if compares else {}
    measured = on_cpu(on_this_rank(rank))
    ranks: list[Any] | None = [None] * rank.world_size if compares else None
    dist.gather_object(measured, ranks, group=cpu_group)
    different = [False]
    if ranks is not None:
        names = dict.fromkeys([*expected, *(name for gradients in ranks for name in gradients)])
        results = {name: compare(name, ranks, expected, rounded) for name in names}
        different = [print_table(results)]
    dist.broadcast_object_list(different, group=cpu_group)
    sys.stdout.flush()
    # Exit at once, since destroying a process group may wait for another rank.
    os._exit(int(different[0]))
