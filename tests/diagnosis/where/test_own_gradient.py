"""A rank's own gradient is not what its rows give: the rank and the line are named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case
from tests.diagnosis.where.faulty import (
    CASE,
    NEAR,
    average,
    distance,
    loss,
    marked_line,
    where,
)


def labels_shifted_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    targets = shard["targets"]
    if rank.rank == 1:
        targets = targets.roll(1, 0)  # fault
    output = ddp(shard["rows"])
    nn.functional.mse_loss(output, targets).backward()


def detached_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    hidden = model.first(shard["rows"])
    hidden = torch.tanh(model.norm(hidden))
    if rank.rank == 1:
        hidden = hidden.detach() + 0 * hidden  # fault
    output = model.head(torch.tanh(model.middle(hidden)))
    value = nn.functional.mse_loss(output, shard["targets"])
    value.backward()
    average(model)


def gradient_hook_on_a_module(model: Any, shard: Any, rank: Any) -> None:
    if rank.rank == 0:
        model.middle.register_full_backward_hook(lambda _, given, out: (2 * given[0],))  # fault
    value = loss(model, shard)
    value.backward()
    average(model)


def targets_of_the_second_micro_batch(model: Any, shard: Any, rank: Any) -> None:
    for number in range(2):
        rows = shard["rows"][2 * number : 2 * number + 2]
        targets = shard["targets"][:2]  # fault
        value = nn.functional.mse_loss(model(rows), targets) / 2
        value.backward()
    average(model)


def module_skipped_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    hidden = model.first(shard["rows"])
    if rank.rank != 1:
        hidden = model.norm(hidden)  # fault
    output = model.head(torch.tanh(model.middle(torch.tanh(hidden))))
    nn.functional.mse_loss(output, shard["targets"]).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average(model)


EVERY = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("case", "step", "ranks", "words"),
    [
        (CASE, labels_shifted_on_one_rank, (1,), "its own rows give"),
        (
            CASE,
            detached_on_one_rank,
            (1,),
            "the loss is right, and the gradient of norm.bias",
        ),
        (
            CASE,
            gradient_hook_on_a_module,
            (0,),
            "the loss is right, and the gradient of norm.bias",
        ),
        (CASE, targets_of_the_second_micro_batch, EVERY, "backward pass 2 of 2"),
        (CASE, module_skipped_on_one_rank, (1,), "the module norm is not called"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_own_gradient_is_found(
    case: Case, step: Callable[..., Any], ranks: tuple[int, ...], words: str
) -> None:
    found = where(case, step)
    assert found.kind == "own gradient"
    assert found.ranks == ranks
    assert words.casefold() in found.sentence.casefold()
    assert distance(found, step) <= NEAR


def test_a_line_that_only_the_wrong_rank_runs_is_pointed_at() -> None:
    found = where(CASE, labels_shifted_on_one_rank)
    notes = {one.line.number: one.note for one in found.lines}
    fault = marked_line(labels_shifted_on_one_rank)
    assert "only rank 1 runs this line" in notes[fault]
    assert re.fullmatch(r"rank 1: its loss is [\d.]+, its own rows give [\d.]+", found.headline)
