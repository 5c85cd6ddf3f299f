"""DDP with the mean over all ranks: the loss sum, times world size, divided by the global count."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.case.build import catalogue_loss_of
from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def cause_of_difference(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_divided_globally()


def prepare(task: Task) -> TrainStep:
    ddp = task.wrap()
    loss = catalogue_loss_of(task.case, needed_by="ddp_global_mean")
    world_size = task.rank.world_size

    def step(shard: Any) -> None:
        terms = loss.normalisers(shard)
        counts = torch.tensor(
            [term.count for term in terms], dtype=torch.float64, device=task.rank.device
        )
        dist.all_reduce(counts)
        value = torch.zeros((), device=task.rank.device)
        totals = loss.totals(ddp, ddp(shard["inputs"]), shard)
        for total, term, count in zip(totals, terms, counts.tolist(), strict=True):
            if term.kind == "once":
                value = value + total
            elif term.kind == "sum":
                value = value + world_size * total
            else:
                value = value + world_size * total / count
        value.backward()

    return step


STRATEGY = Strategy(
    name="ddp_global_mean",
    promise="The summed loss times world size, divided by the global count, gives the gradient of "
    "the big batch for any shards, even empty ones, if the loss adds up over examples.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    needs_normalisers=True,
)
