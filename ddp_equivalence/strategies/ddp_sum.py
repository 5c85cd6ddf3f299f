"""DDP with a sum-reduced loss, times the world size, which cancels the divisor of DDP's average."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.strategies.sharded_batch import ShardedBatch
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def cause_of_difference(sharded_batch: ShardedBatch) -> str | None:
    return sharded_batch.cause_if_summed(sharded_batch.shards.indices, sums_constants=False)


def prepare(task: Task) -> TrainStep:
    ddp = task.wrap()

    def step(shard: Any) -> None:
        scaled_loss(task, ddp, shard).backward()

    return step


def scaled_loss(task: Task, ddp: nn.Module, shard: Any) -> Tensor:
    """World size times every term of the loss that depends on the data.

    Other terms are not multiplied: they are the same on all ranks, so that DDP's average leaves
    them as they are.
    """
    world_size = task.rank.world_size
    loss = LOSSES[task.case.loss] if isinstance(task.case.loss, str) else None
    terms = loss.normalisers(shard) if loss else ()
    if loss is None or all(term.kind != "once" for term in terms):
        return world_size * task.loss(ddp, shard)
    totals = loss.totals(ddp, ddp(shard["inputs"]), shard)
    value = totals[0].new_zeros(())
    for total, term in zip(totals, terms, strict=True):
        value = value + total / term.count * (1 if term.kind == "once" else world_size)
    return value


STRATEGY = Strategy(
    name="ddp_sum",
    promise="The loss is a sum, times world size. Averaged over ranks, this gives the gradient of "
    "the sum over the big batch, however uneven the shards are.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
)
