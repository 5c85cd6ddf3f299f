"""The sum over all tokens or elements is divided by the number of examples."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_equivalence.case.batch import count_examples
from ddp_equivalence.case.build import catalogue_loss_of
from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere
from ddp_equivalence.strategies.strategy import Task, TrainStep


def divide_by_examples(task: Task, step: TrainStep, record_firing: RecordFiring) -> TrainStep:
    """A step that divides the gradient of the summed losses of all ranks by all examples."""
    ddp = task.wrap()
    loss = catalogue_loss_of(task.case, needed_by="divided_by_another_count")

    def broken(shard: Any) -> None:
        totals = loss.totals(ddp, ddp(shard["inputs"]), shard)
        (task.rank.world_size * torch.stack(totals).sum()).backward()
        examples = torch.tensor(
            float(count_examples(shard, task.case.batch_dims)), device=task.rank.device
        )
        dist.all_reduce(examples)
        record_firing()
        for parameter in task.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= int(examples)

    return broken


FAULT = Fault(
    name="divided_by_another_count",
    sentence="The sum over all tokens or elements is divided by the number of examples.",
    break_step=divide_by_examples,
    why_it_cannot_show=shows_everywhere,
    strategies=("ddp_global_mean",),
    pairs=(("gru_tied", "token_mean"), ("attention_tied", "token_mean"), ("mlp", "mse_mean")),
    own_step="",
)
