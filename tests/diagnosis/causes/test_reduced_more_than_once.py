"""Gradients that are added up over the same ranks twice, and those that only look like it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case, Rank, check
from tests.package.pointed_at import assert_points_at_the_fault, judged, mean_loss

pytestmark = pytest.mark.self_check

Rows = dict[str, torch.Tensor]


class Tied(nn.Module):
    """The weight of ``inner`` is used by two layers, and has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(rows)))  # type: ignore[no-any-return]


def squares(model: nn.Module, batch: Rows) -> torch.Tensor:
    return (model(batch["rows"]) - batch["targets"]).square().mean()  # type: ignore[no-any-return]


def make(generator: torch.Generator) -> Rows:
    rows = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    return {"rows": rows, "targets": rows.roll(1, 0)}


def tied_case(layout: str = "1x3") -> Case:
    return Case(model=Tied, batch=make, loss=squares, layout=layout, dtype=torch.float64)


def weights_of_layers(model: nn.Module, shard: Rows, rank: Rank) -> None:
    """The loss divides by the ranks, and the list of the layers has one weight twice."""
    (squares(model, shard) / rank.world_size).backward()
    collected = []
    for layer in model.children():
        for parameter in layer.parameters():
            if parameter.grad is not None:
                collected.append(parameter)
    for parameter in collected:
        dist.all_reduce(parameter.grad)


def sums_and_sums(model: Any, rows: Any, rank: Rank) -> None:
    mean_loss(model, rows).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the fault


def after_each_half(model: Any, rows: Any, rank: Rank) -> None:
    """What the first half left was added up already when the second half is added to it."""
    for inputs, targets in zip(rows["x"].chunk(2), rows["y"].chunk(2), strict=True):
        half = mean_loss(model, {"x": inputs, "y": targets})
        (half / (2 * rank.world_size)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # the fault


def in_slices_without_division(model: nn.Module, shard: Rows, rank: Rank) -> None:
    """Each gradient goes into two sums, but each of its elements into one only."""
    squares(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        flat = parameter.grad.view(-1)
        dist.all_reduce(flat[:2])
        dist.all_reduce(flat[2:])


def in_nodes_and_between(model: nn.Module, shard: Rows, rank: Rank) -> None:
    """Each gradient goes into two sums, among different ranks."""
    squares(model, shard).backward()
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=nodes[rank.rank // 2])
        dist.all_reduce(parameter.grad, group=across[rank.rank % 2])


def test_a_tied_weight_that_is_listed_twice_is_named_with_what_lists_it() -> None:
    verdict = check(tied_case(), weights_of_layers)
    assert verdict.cause == "reduced_more_than_once", verdict
    text = str(verdict)
    assert "all_reduces inner.weight 2 times" in text
    assert "if parameter.grad is not None:" in text
    assert "never divided" not in text


@pytest.mark.parametrize(
    ("step", "fix"),
    [
        (sums_and_sums, "once in a step, not several times"),
        (after_each_half, "after the last backward pass that adds to it"),
    ],
)
def test_a_second_sum_is_pointed_at(step: Any, fix: str) -> None:
    assert_points_at_the_fault(judged(step), "reduced_more_than_once", fix)


@pytest.mark.parametrize(
    ("step", "layout"),
    [
        (in_slices_without_division, "1x3"),
        (in_nodes_and_between, "2x2"),
    ],
)
def test_what_is_added_up_once_is_not_said_to_be_added_up_again(step: Any, layout: str) -> None:
    verdict = check(tied_case(layout), step)
    assert verdict.cause == "sum_not_mean", verdict
    assert "more than once" not in str(verdict)
    assert "the same gradients again" not in str(verdict)


def a_copy_is_summed_twice(model: nn.Module, shard: Rows, rank: Rank) -> None:
    """The loss divides by the ranks; no gradient itself goes into a collective."""
    (squares(model, shard) / rank.world_size).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat, gradients)


def test_no_division_is_missing_where_the_sum_is_right() -> None:
    verdict = check(tied_case(), a_copy_is_summed_twice)
    assert verdict.outcome == "different"
    assert "never divided" not in str(verdict)
    assert "the loss is summed" not in str(verdict)
