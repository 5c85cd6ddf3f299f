"""A step that does not run on one rank is compared with the loss of the case, on all its ranks.

Its ranks have parts of a layer, of sequences or of the model, so no rank has the values of the
loss, and none must be told that a part of a value, or of a sum, is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.diagnosis.where.whereabouts import LOOK_FIRST
from tests.diagnosis.where.faulty import distance, unnamed

HIDDEN, WIDTH, LENGTH = 6, 10, 8


class Split(nn.Module):
    """A feed-forward layer that pairs of ranks share, each with half of its hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, HIDDEN)
        self.places = nn.Parameter(torch.randn(LENGTH, HIDDEN))
        self.up = nn.Linear(HIDDEN, WIDTH)
        self.down = nn.Linear(WIDTH, HIDDEN)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.embed(rows) + self.places
        output: Tensor = hidden + self.down(F.gelu(self.up(hidden)))
        return output


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"])


CASE = Case(
    model=Split,
    batch=lambda generator: {
        "rows": torch.randn(8, LENGTH, 4, generator=generator),
        "targets": torch.randn(8, LENGTH, HIDDEN, generator=generator),
    },
    loss=loss,
    layout="2x2",
    shards="own",
)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        hidden = hidden.clone()
        dist.all_reduce(hidden, group=group)
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class LeaveToAll(Leave):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        hidden = hidden.clone()
        dist.all_reduce(hidden)  # fault
        return hidden


def split_layer(
    model: Any,
    batch: dict[str, Tensor],
    rank: Rank,
    apply: Any,
    error: Any = F.mse_loss,
    leave: Any = Leave,
) -> None:
    """Two ranks share a layer, and two such pairs share the examples."""
    assert rank.world_size == 4, "this step needs four ranks"
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, part = divmod(rank.rank, 2)
    mine = slice(part * WIDTH // 2, (part + 1) * WIDTH // 2)
    rows, targets = (batch[name].chunk(2)[pair] for name in ("rows", "targets"))
    hidden = model.embed(rows) + model.places
    entered: Any = Enter
    partial = apply(model, entered.apply(hidden, pairs[pair]), mine)
    output = hidden + leave.apply(partial, pairs[pair])
    error(output, targets).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        is_split = parameter in {model.up.weight, model.up.bias, *model.down.parameters()}
        parameter.grad /= 2 if is_split else 4


def right(model: Split, hidden: Tensor, mine: slice) -> Tensor:
    units = F.gelu(F.linear(hidden, model.up.weight[mine], model.up.bias[mine]))
    return F.linear(units, model.down.weight[:, mine], model.down.bias / 2)


def bias_on_each_rank(model: Split, hidden: Tensor, mine: slice) -> Tensor:
    units = F.gelu(F.linear(hidden, model.up.weight[mine], model.up.bias[mine]))
    return F.linear(units, model.down.weight[:, mine], model.down.bias)  # fault


def units_of_another_layer(model: Split, hidden: Tensor, mine: slice) -> Tensor:
    units = F.gelu(F.linear(hidden, model.up.weight[mine], model.up.bias[: WIDTH // 2]))  # fault
    return F.linear(units, model.down.weight[:, mine], model.down.bias / 2)


def split_sequences(model: Any, batch: dict[str, Tensor], rank: Rank) -> None:
    """Each rank has a part of every sequence."""
    assert rank.world_size == 4, "this step needs four ranks"
    rows, targets = (batch[name].chunk(4, 1)[rank.rank] for name in ("rows", "targets"))
    places = torch.arange(rows.shape[1])
    hidden = model.embed(rows) + model.places[places]  # fault
    output = hidden + model.down(F.gelu(model.up(hidden)))
    (F.mse_loss(output, targets) / 4).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def split_model(model: Any, batch: dict[str, Tensor], rank: Rank) -> None:
    """The first two ranks embed, the last two have the layer, as in a pipeline."""
    assert rank.world_size == 4, "this step needs four ranks"
    rows, targets = (batch[name].chunk(2)[rank.rank % 2] for name in ("rows", "targets"))
    hidden = model.embed(rows) + model.places
    hidden = collectives.all_gather(hidden)[rank.rank % 2]
    if rank.rank < 2:
        output = hidden
        (0 * output.sum()).backward()
    else:
        output = hidden + model.down(F.gelu(model.up(hidden.tanh())))  # fault
        (F.mse_loss(output, targets) / 2).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


@pytest.mark.parametrize("apply", [bias_on_each_rank, units_of_another_layer])
def test_the_line_that_computes_another_part_is_marked(apply: Any) -> None:
    where = unnamed(CASE, lambda model, batch, rank: split_layer(model, batch, rank, apply))
    assert (where.is_right_alone, where.marks) == (None, LOOK_FIRST)
    assert distance(where, apply) == 0


def rounded_error(output: Tensor, targets: Tensor) -> Tensor:
    return F.smooth_l1_loss(output, targets)  # fault


def test_parts_of_sums_and_of_layers_are_not_marked() -> None:
    where = unnamed(
        CASE, lambda model, batch, rank: split_layer(model, batch, rank, right, rounded_error)
    )
    assert [one.is_fault for one in where.lines].count(True) == 1
    assert where.lines[0].is_fault
    assert distance(where, rounded_error) == 0


def test_a_reduction_over_other_ranks_is_marked_and_not_the_parts_that_it_adds_up() -> None:
    where = unnamed(
        CASE,
        lambda model, batch, rank: split_layer(model, batch, rank, right, leave=LeaveToAll),
    )
    assert where.lines[0].is_fault
    assert distance(replace(where, lines=where.lines[:1]), LeaveToAll.forward) == 0


@pytest.mark.parametrize("step", [split_sequences, split_model])
def test_the_line_with_a_value_that_the_loss_lacks_is_marked(step: Any) -> None:
    where = unnamed(CASE, step)
    assert (where.is_right_alone, where.marks) == (None, LOOK_FIRST)
    assert distance(where, step) == 0


class OwnGelu(torch.autograd.Function):
    """Its forward pass is right, by way of values that the loss of the case does not have."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        moved = hidden.exp()
        ctx.save_for_backward(moved)
        return F.gelu(moved.log())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (moved,) = ctx.saved_tensors
        return gradient.mul(moved / (1 + moved))  # fault


def by_an_own_function(model: Split, hidden: Tensor, mine: slice) -> Tensor:
    own: Any = OwnGelu
    units = own.apply(F.linear(hidden, model.up.weight[mine], model.up.bias[mine]))
    return F.linear(units, model.down.weight[:, mine], model.down.bias / 2)


def test_where_the_losses_are_right_the_own_backward_methods_are_shown_and_none_is_marked() -> None:
    where = unnamed(
        CASE, lambda model, batch, rank: split_layer(model, batch, rank, by_an_own_function)
    )
    of_backward = tuple(one for one in where.lines if one.line.function == "backward")
    assert distance(replace(where, lines=of_backward), OwnGelu.backward) == 0
    assert not any(one.is_fault for one in where.lines)  # those of the split layer run as well


def test_the_same_layer_split_rightly_is_the_same() -> None:
    found = check(CASE, lambda model, batch, rank: split_layer(model, batch, rank, right))
    assert found.outcome == "same", str(found)
