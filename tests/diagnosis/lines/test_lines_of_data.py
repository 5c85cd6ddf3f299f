"""A report about wrong examples points at the line that chooses them or takes a share of them."""

# mypy: disable-error-code="arg-type, operator, union-attr, assignment, index, misc, var-annotated"
# mypy: disable-error-code="no-any-return"
# Users write their steps without asking whether there is a gradient.

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Case, check
from tests.diagnosis.names.small_case import average
from tests.package.pointed_at import (
    MARK,
    Rows,
    Step,
    checked,
    faulty_lines,
    make_rows,
    marked_case,
    mean_loss,
    notes,
)


def loaded(batch: Rows, sampler: Any, size: int, drop_last: bool = False) -> Iterator[Rows]:
    data = TensorDataset(batch["x"], batch["y"])
    loader = DataLoader(data, batch_size=size, sampler=sampler, drop_last=drop_last)
    for inputs, targets in loader:
        yield {"x": inputs, "y": targets}


def no_sampler(model: nn.Module, batch: Rows, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["x"], batch["y"])
    loader = DataLoader(data, batch_size=len(data) // rank.world_size)  # the fault
    inputs, targets = next(iter(loader))
    outputs = ddp(inputs)
    loss = nn.functional.mse_loss(outputs, targets)
    loss.backward()


def sampler_that_pads(model: nn.Module, batch: Rows, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["x"], batch["y"])
    sampler = DistributedSampler(data, shuffle=False)  # the fault
    sampler.set_epoch(0)
    for part in loaded(batch, sampler, len(sampler)):
        loss = mean_loss(ddp, part)
        loss.backward()


def sampler_that_drops(model: nn.Module, batch: Rows, rank: Any) -> None:
    data = TensorDataset(batch["x"], batch["y"])
    sampler = DistributedSampler(data, shuffle=False, drop_last=True)  # the fault
    for part in loaded(batch, sampler, len(sampler), drop_last=True):
        mean_loss(model, part).backward()
    average(model, rank.world_size)


def train_on(model: nn.Module, mine: Rows, examples: int) -> None:
    """Every example counts 1 / examples."""
    errors = (model(mine["x"]) - mine["y"]).square().mean(1)
    (errors.sum() / examples).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def reader_of(rank: Any, examples: int) -> Callable[[Rows], Rows]:
    """A closure that knows the rank."""
    size = examples // rank.world_size
    begin = rank.local_rank * size  # the fault

    def read(batch: Rows) -> Rows:
        return {name: leaf[begin : begin + size] for name, leaf in batch.items()}

    return read


def in_a_closure(model: nn.Module, batch: Rows, rank: Any) -> None:
    read = reader_of(rank, len(batch["x"]))
    train_on(model, read(batch), len(batch["x"]))


class Stream:
    """Goes through the rows of a rank."""

    def __init__(self, batch: Rows, rank: Any) -> None:
        self.pairs = list(zip(batch["x"], batch["y"], strict=True))
        self.rank = rank

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from islice(self.pairs, self.rank.rank, None, self.rank.world_size)


def in_two_places(model: nn.Module, batch: Rows, rank: Any) -> None:
    stream = Stream(batch, rank)
    size, own = rank.world_size, rank.rank
    kept = [row for place, row in enumerate(stream) if place % size == own]  # the fault
    mine = {
        name: torch.stack(parts) for name, parts in zip("xy", zip(*kept, strict=True), strict=True)
    }
    train_on(model, mine, len(batch["x"]))


def loaded_at_once(batch: Rows, sampler: Any) -> Rows:
    data = TensorDataset(batch["x"], batch["y"])
    inputs, targets = next(iter(DataLoader(data, batch_size=len(data), sampler=sampler)))
    return {"x": inputs, "y": targets}


def in_a_sampler_of_too_many(model: nn.Module, batch: Rows, rank: Any) -> None:
    workers = rank.world_size * 2  # the fault
    sampler = DistributedSampler(batch["x"], num_replicas=workers, rank=rank.rank, shuffle=False)
    train_on(model, loaded_at_once(batch, sampler), len(batch["x"]))


def beside_another_fault(model: nn.Module, batch: Rows, rank: Any) -> None:
    in_a_closure(model, batch, rank)
    model[0].bias.grad[rank.rank] += 0.1


def right_shares_and_a_wrong_factor(model: nn.Module, batch: Rows, rank: Any) -> None:
    own = slice(int(rank), None, rank.world_size)
    train_on(model, {name: leaf[own] for name, leaf in batch.items()}, len(batch["x"]) * 3)


OWN = marked_case("1x4", shards="own")
OWN_TEN = marked_case("1x4", shards="own", batch=partial(make_rows, count=10))
ON_NODES = marked_case("2x2", shards="own")

FAULTS = [
    (no_sampler, OWN, "every_rank_same_data", "all 4 ranks read"),
    (
        sampler_that_pads,
        OWN_TEN,
        "sampler_padding_counted",
        "pads 10 examples by 2",
    ),
    (
        sampler_that_drops,
        OWN_TEN,
        "examples_dropped",
        "leaves out 2 examples",
    ),
    (in_a_closure, ON_NODES, "shares_overlap", "uses rank.local_rank"),
    (in_two_places, ON_NODES, "examples_dropped", "uses self.rank.rank"),
    (in_a_sampler_of_too_many, ON_NODES, "examples_dropped", "gives num_replicas"),
]


@pytest.mark.parametrize(("step", "given", "cause", "note"), FAULTS)
def test_the_line_that_gives_ranks_wrong_examples_is_pointed_at(
    step: Step, given: Case, cause: str, note: str
) -> None:
    verdict = checked(given, step, cause)
    assert any(MARK in line for line in faulty_lines(verdict)), verdict
    assert note in notes(verdict)


def test_a_report_without_a_cause_says_which_examples_were_read_twice_and_by_none() -> None:
    verdict = check(ON_NODES, beside_another_fault)
    assert (verdict.outcome, verdict.causes) == ("different", ()), verdict
    report = " ".join(str(verdict).split())
    assert "Ranks 0, 2 both read examples 0 to 3; ranks 1, 3 both 4 to 7" in report
    assert "no rank reads 8 to 15." in report


def test_shares_that_are_right_are_not_said_to_overlap() -> None:
    verdict = check(ON_NODES, right_shares_and_a_wrong_factor)
    assert verdict.outcome == "different"
    assert "read example" not in str(verdict)
    assert "no rank reads" not in str(verdict)
