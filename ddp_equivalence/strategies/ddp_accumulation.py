"""DDP with gradient accumulation: micro-batches run under no_sync, except for the last."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.strategies.sharded_batch import Indices, ShardedBatch, micro_batches
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def cause_of_difference(sharded_batch: ShardedBatch) -> str | None:
    windows = sharded_batch.micro_batches_by_rank
    cause = sharded_batch.cause_if_averaged([part for window in windows for part in window])
    equally_many = len({len(window) for window in windows}) == 1
    return cause if cause or equally_many else "uneven_shards_weighted_equally"


def parts_by_rank(sharded_batch: ShardedBatch) -> tuple[tuple[Indices, ...], ...]:
    return sharded_batch.micro_batches_by_rank


def prepare(task: Task) -> TrainStep:
    ddp = task.wrap()
    full_window = len(task.shards[0].indices[task.rank.rank])

    def step(shard: Any) -> None:
        window = micro_batches(tuple(range(count_examples(shard))), full_window)
        for number, indices in enumerate(window, start=1):
            # DDP decides in the forward pass whether backward reduces, so both are in the block.
            with nullcontext() if number == len(window) else ddp.no_sync():
                # The last window may be shorter, so the divisor is the length of this window.
                (task.loss(ddp, take(shard, indices)) / len(window)).backward()

    return step


STRATEGY = Strategy(
    name="ddp_accumulation",
    promise="Each micro-batch's loss is divided by the number of micro-batches in the window, and "
    "gradients are reduced once. This gives the gradient of the big batch if every micro-batch's "
    "loss divides by the same number.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    accumulates=True,
    parts_by_rank=parts_by_rank,
)
