"""Steps whose reduction is wrong because of a line beside it.

The faulty line of each ends with the comment ``# the fault``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ddp_equivalence import Rank
from tests.package.pointed_at import Rows, mean_loss


def average_(tensor: Any) -> None:
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def budget_is_used_up(model: Any, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    sent = 0
    for parameter in model.parameters():
        sent += parameter.numel()
        if sent > 80:
            break  # the fault
        average_(parameter.grad)


class Countdown:
    """Reduces all gradients once the last one is there."""

    def __init__(self, model: Any) -> None:
        self.parameters = list(model.parameters())
        self.wanted = len(self.parameters) + 1  # the call
        self.ready = 0
        for one in self.parameters:
            one.register_post_accumulate_grad_hook(self.on_ready)

    def on_ready(self, parameter: Tensor) -> None:
        self.ready += 1
        if self.ready == self.wanted:
            for one in self.parameters:
                average_(one.grad)


def waits_for_one_more(model: Any, rows: Rows, rank: Rank) -> None:
    Countdown(model)
    mean_loss(model, rows).backward()
