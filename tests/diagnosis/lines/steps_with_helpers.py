"""Steps whose fault is where or how often a helper is called, or a result that nothing uses.

The faulty line of each ends with the comment ``# the fault``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Rank
from tests.package.pointed_at import Rows, halves, mean_loss


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        average_(parameter.grad)


def average_(tensor: Any) -> None:
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


class Summing:
    """Adds gradients up over the ranks each time that it is left."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def finish(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)


def summed_by_a_method(model: nn.Module, rows: Rows, rank: Rank) -> None:
    summing = Summing(model)
    for half in halves(rows):
        summing.backward(mean_loss(model, half) / (2 * rank.world_size))
        summing.finish()  # the fault


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def cleared_by_a_helper(model: nn.Module, rows: Rows, rank: Rank) -> None:
    for half in halves(rows):
        clear(model)  # the fault
        (mean_loss(model, half) / 2).backward()
    average(model)


def rows_of_a_mask(model: Any, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    weight = model[0].weight.grad
    for name, parameter in model.named_parameters():
        if name != "0.weight":
            average_(parameter.grad)
    average_(weight[weight.norm(dim=1) >= 0])  # the fault


def copies_of(model: nn.Module) -> dict[str, Any]:
    named = model.named_parameters()
    return {name: one.grad.clone() for name, one in named if one.grad is not None}


def copies_from_a_function(model: nn.Module, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    copied = copies_of(model)
    for name in copied:
        print(end="")
        average_(copied[name])  # the fault


def divide_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= dist.get_world_size()


def divided_once_more_by_a_helper(model: nn.Module, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    average(model)
    divide_all(model)  # the call
