"""Post-local SGD: DDP averages gradients inside each node, and weights over all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from ddp_equivalence.strategies.ddp_mean import cause_of_difference
from ddp_equivalence.strategies.hybrid import process_groups
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def prepare(task: Task) -> TrainStep:
    from torch.distributed.optim import PostLocalSGDOptimizer

    ddp = task.wrap()
    node = process_groups(task.case.ranks)[0][task.rank.node]
    ddp.register_comm_hook(PostLocalSGDState(None, node, 0), post_localSGD_hook)
    with warnings.catch_warnings():
        # Torch advises longer periods, which save time and leave other weights.
        warnings.simplefilter("ignore", UserWarning)
        averager = PeriodicModelAverager(period=1, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(task.model.parameters(), lr=task.lr), averager
    )

    def step(shard: Any) -> None:
        optimizer.zero_grad()
        task.loss(ddp, shard).backward()
        optimizer.step()

    return step


STRATEGY = Strategy(
    name="post_local_sgd",
    promise="Each node steps with the average of its ranks' gradients, and the weights are "
    "averaged over all ranks after each step. With plain SGD this is the update of the big batch "
    "if the loss is a mean and every rank's loss divides by the same number; the gradients "
    "themselves are only those of the node.",
    cause_of_difference=cause_of_difference,
    prepare=prepare,
    has_the_rule_of="ddp_mean",
    # Torch averages the weights that have gradients, which must be the same ones on all nodes, and
    # its hooks take no sparse ones.
    takes=lambda model: not (model.unused_on_some_ranks or model.sparse_gradients),
    trains=True,
)
