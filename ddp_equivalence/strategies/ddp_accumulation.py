"""DDP with gradient accumulation: micro-batches under no_sync, the last one reduces."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.strategies.sharded_batch import Facts, Indices, micro_batches
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def breaks(facts: Facts) -> str | None:
    parts = facts.micro_shards
    wrong = facts.mean_over([part for of_rank in parts for part in of_rank])
    as_many_each = len({len(of_rank) for of_rank in parts}) == 1
    return wrong if wrong or as_many_each else "uneven_shards_weighted_equally"


def contributions(facts: Facts) -> tuple[tuple[Indices, ...], ...]:
    return facts.micro_shards


def prepare(task: Task) -> TrainStep:
    ddp = task.wrap()
    full_window = len(task.shards[0].indices[task.rank.rank])

    def step(shard: Any) -> None:
        window = micro_batches(tuple(range(count_examples(shard))), full_window)
        for number, indices in enumerate(window, start=1):
            # The forward pass decides whether this backward reduces, so it is inside as well.
            with nullcontext() if number == len(window) else ddp.no_sync():
                # Divided by the micro-batches of this window: the last one may be shorter.
                (task.loss(ddp, take(shard, indices)) / len(window)).backward()

    return step


STRATEGY = Strategy(
    name="ddp_accumulation",
    promise="Micro-batch losses divided by the number of micro-batches in the window, reduced "
    "once, are the big batch if every micro-batch's loss divides by the same number.",
    breaks=breaks,
    prepare=prepare,
    contributions=contributions,
)
