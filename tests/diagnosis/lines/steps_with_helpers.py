"""Steps whose fault is where or how often a helper is called, or a result that nothing uses.

The faulty line of each ends with the comment ``# the fault``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Rank
from tests.package.pointed_at import Rows, halves, mean_loss


def add_up(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


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


def scaled(scale: float, gradient: Tensor) -> None:
    gradient.mul(scale)  # the fault


class Late:
    """A hook that is an object."""

    def __init__(self, rank: Rank) -> None:
        self.count = rank.world_size

    def __call__(self, parameter: Any) -> None:
        mean = parameter.grad / self.count  # noqa: F841  # the fault


def computed_by_a_late_hook(model: nn.Module, rows: Rows, rank: Rank) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(Late(rank))
    mean_loss(model, rows).backward()
    add_up(model)


def divided_out_of_place(model: nn.Module, rows: Rows, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    for gradient in gradients:
        dist.all_reduce(gradient)
        assert gradient is not None
    for gradient in gradients:
        gradient.div(rank.world_size)  # type: ignore[union-attr]  # the fault


def watched_by_a_hook(model: nn.Module, rows: Rows, rank: Rank) -> None:
    """The hook looks at the gradient, and rightly returns nothing: the sum is never divided."""
    norms: list[Tensor] = []

    def look(gradient: Tensor) -> None:
        scaled = gradient / rank.world_size
        norms.append(scaled.norm())

    for parameter in model.parameters():
        parameter.register_hook(look)
    mean_loss(model, rows).backward()
    add_up(model)


def changed_in_place(model: nn.Module, rows: Rows, rank: Rank) -> None:
    """The hook changes the gradient itself, by too little."""

    def halve(gradient: Tensor) -> None:
        half = gradient / 2
        gradient.copy_(half)

    for parameter in model.parameters():
        parameter.register_hook(halve)
    mean_loss(model, rows).backward()
    add_up(model)


def probe(model: nn.Module, rows: Rows) -> None:
    mean_loss(model, rows).backward()


def cleared_where_large(model: nn.Module, rows: Rows, rank: Rank) -> None:
    probe(model, rows)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # the fault
            parameter.grad = None
    mean_loss(model, rows).backward()
    average(model)


def groups_of(size: int, rank: Rank) -> Any:
    count = rank.world_size // size
    mine = None
    for number in range(count):
        ranks = list(range(number * size, (number + 1) * size))  # the fault
        group = dist.new_group(ranks)
        mine = group if rank.rank in ranks else mine
    return mine


def in_computed_groups(model: nn.Module, rows: Rows, rank: Rank) -> None:
    group = groups_of(2, rank)
    mean_loss(model, rows).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= 2


class Layout:
    """The rank's neighbours."""

    def __init__(self, rank: Rank) -> None:
        self.members = [r for r in range(rank.world_size) if r % 2 == rank.rank % 2]  # the fault

    def make(self) -> Any:
        return dist.new_group(self.members, use_local_synchronization=True)


class Divided:
    """Divides by the last number that it was given."""

    def __init__(self) -> None:
        self.number = 1.0

    def watch(self, module: nn.Module, number: float) -> None:
        self.number = number
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter: Any) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(self.number)  # the fault


def two_heads(model: Any, rows: Rows, part: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    hidden = model[0](rows["x"])
    return part(hidden).square(), model[4](model[2](torch.tanh(hidden.detach()))).square()


def divided_by_the_last_number(model: Any, rows: Rows, rank: Rank) -> None:
    divided = Divided()
    divided.watch(model[0], rank.world_size * rows["x"].shape[0] * 8)
    divided.watch(model[2:], rank.world_size * rows["x"].shape[0] * 3)
    first, second = two_heads(model, rows, torch.tanh)
    first.sum().backward()
    second.sum().backward()


def two_losses(model: Any, rows: Rows) -> Tensor:
    first, second = two_heads(model, rows, torch.tanh)
    return first.mean() + second.mean()
