"""Steps in which gradients, ranks or elements part where they must not, at ``# fault``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.diagnosis.lines.faulty_line import mean_squares

Batch = dict[str, Tensor]


class Countdown:
    """Reduces all gradients once the last one is there."""

    def __init__(self, model: Any) -> None:
        self.parameters = list(model.parameters())
        self.wanted = len(self.parameters) + 1  # fault
        self.ready = 0

        self.hooks = [
            one.register_post_accumulate_grad_hook(self.on_ready) for one in self.parameters
        ]

    def on_ready(self, parameter: Tensor) -> None:
        self.ready += 1
        if self.ready == self.wanted:
            for one in self.parameters:
                dist.all_reduce(one.grad)
                one.grad /= dist.get_world_size()


def waits_for_one_more(model: Any, batch: Batch, rank: Any) -> None:
    countdown = Countdown(model)
    mean_squares(model, batch).backward()
    for hook in countdown.hooks:
        hook.remove()
