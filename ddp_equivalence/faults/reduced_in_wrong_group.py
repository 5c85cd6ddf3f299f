"""Gradients are reduced between two neighbouring ranks each, and nothing joins these pairs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.faults.fault import Fault, RecordFiring
from ddp_equivalence.ranks import process_state
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients
from ddp_equivalence.strategies.strategy import Task, TrainStep


def reduce_in_pairs(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that all-reduces gradients in groups of two ranks."""
    pairs = _pairs(task.rank.world_size, dist.group.WORLD)
    ranks, group = pairs[task.rank.rank // 2]

    def broken(shard: Any) -> None:
        task.loss(task.model, shard).backward()
        reduce_gradients(task.model, divisor=len(ranks), group=group)
        if len(pairs) > 1:
            record_firing()

    return broken


@cache
def _pairs(world_size: int, _: object) -> tuple[tuple[range, dist.ProcessGroup], ...]:
    """The groups, made once for each world group: torch 2.13 hangs if a loop makes them anew."""
    ranks_of_pairs = [range(first, min(first + 2, world_size)) for first in range(0, world_size, 2)]
    pairs = tuple((ranks, dist.new_group(list(ranks))) for ranks in ranks_of_pairs)
    for _, group in pairs:
        process_state.keep_group(group)
    return pairs


def why_it_cannot_show(layout: Layout) -> str | None:
    """Two ranks are a single pair."""
    return "there is only one pair of ranks" if layout.world_size < 3 else None


FAULT = Fault(
    name="reduced_in_wrong_group",
    sentence="The step all-reduces gradients in groups of two ranks, and nothing joins them.",
    break_step=reduce_in_pairs,
    strategies=("manual_all_reduce_mean",),
    why_it_cannot_show=why_it_cannot_show,
    own_step="",
)
