"""The real nn.DataParallel, on two or more CUDA devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ddp_equivalence.strategies.sharded_batch import Facts
from ddp_equivalence.strategies.strategy import Strategy, Task, TrainStep


def breaks(facts: Facts) -> str | None:
    return facts.apart()


def prepare(task: Task) -> TrainStep:
    devices = list(range(min(torch.cuda.device_count(), task.case.ranks.world_size)))
    parallel = nn.DataParallel(task.model, device_ids=devices)
    ran: set[str] = set()

    def saw(module: nn.Module, *arguments: Any) -> None:
        # Replicas share the module's hooks: each tells on which device it was called.
        leaves = pytree.tree_leaves(arguments)
        ran.update(str(leaf.device) for leaf in leaves if isinstance(leaf, torch.Tensor))

    task.model.register_forward_pre_hook(saw, with_kwargs=True)

    def step(batch: Any) -> None:
        ran.clear()
        task.loss(parallel, batch).backward()
        task.notes["replicas"] = len(ran)

    return step


STRATEGY = Strategy(
    name="data_parallel",
    promise="One loss over the gathered outputs is the big batch: the replicas' gradients add up.",
    breaks=breaks,
    prepare=prepare,
    one_process=True,
    lane="data_parallel",
)
