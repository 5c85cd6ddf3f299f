"""A report about wrong examples points at the line that chooses them or takes a share of them."""

# mypy: disable-error-code="arg-type, operator, union-attr, assignment, index, misc, var-annotated"
# mypy: disable-error-code="no-any-return"
# Users write their steps without asking whether there is a gradient.

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_equivalence import Case, check
from tests.diagnosis.lines.faulty_line import Step, case, checked, faults, notes, rows

Batch = dict[str, Tensor]


def all_reduce_gradients(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


class Trainer:
    """Trains on the part of the data that a subclass chooses."""

    def __init__(self, model: nn.Module, rank: Any) -> None:
        self.model = model
        self.rank = rank

    def part_of(self, batch: Batch) -> Batch:
        size = len(batch["x"]) // self.rank.world_size
        start = self.rank.rank * size
        return {name: leaf[start : start + size] for name, leaf in batch.items()}

    def step(self, batch: Batch) -> None:
        mine = self.part_of(batch)
        loss = loss_of(self.model, mine)
        loss.backward()
        all_reduce_gradients(self.model, self.rank.world_size)


def loaded(batch: Batch, sampler: Any, size: int, drop_last: bool = False) -> Iterator[Batch]:
    data = TensorDataset(batch["x"], batch["y"])
    loader = DataLoader(data, batch_size=size, sampler=sampler, drop_last=drop_last)
    for inputs, targets in loader:
        yield {"x": inputs, "y": targets}


def no_sampler(model: nn.Module, batch: Batch, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["x"], batch["y"])
    loader = DataLoader(data, batch_size=len(data) // rank.world_size)
    inputs, targets = next(iter(loader))
    outputs = ddp(inputs)
    loss = nn.functional.mse_loss(outputs, targets)
    loss.backward()


def sampler_of_rank_0(model: nn.Module, batch: Batch, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["x"], batch["y"])
    world_size = dist.get_world_size()
    sampler = DistributedSampler(data, world_size, rank=rank.node, shuffle=False)
    for part in loaded(batch, sampler, len(sampler)):
        loss_of(ddp, part).backward()


def sampler_that_pads(model: nn.Module, batch: Batch, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    data = TensorDataset(batch["x"], batch["y"])
    sampler = DistributedSampler(data, shuffle=False)
    sampler.set_epoch(0)
    for part in loaded(batch, sampler, len(sampler)):
        loss = loss_of(ddp, part)
        loss.backward()


def sampler_that_drops(model: nn.Module, batch: Batch, rank: Any) -> None:
    data = TensorDataset(batch["x"], batch["y"])
    sampler = DistributedSampler(data, shuffle=False, drop_last=True)
    for part in loaded(batch, sampler, len(sampler), drop_last=True):
        loss_of(model, part).backward()
    all_reduce_gradients(model, rank.world_size)


def loader_that_drops(model: nn.Module, batch: Batch, rank: Any) -> None:
    data = TensorDataset(batch["x"], batch["y"])
    loader = DataLoader(data, batch_size=3, drop_last=True)
    model.zero_grad()
    for inputs, targets in loader:
        loss = loss_of(model, {"x": inputs, "y": targets}) / len(loader)
        loss.backward()
    all_reduce_gradients(model, rank.world_size)


class Padded(Trainer):
    def part_of(self, batch: Batch) -> Batch:
        count, ranks = len(batch["x"]), self.rank.world_size
        indices = list(range(count))
        while len(indices) % ranks:
            indices.append(indices[len(indices) - count])
        own = torch.tensor(indices[self.rank.rank :: ranks])
        return {name: leaf[own] for name, leaf in batch.items()}


def padded_by_hand(model: nn.Module, batch: Batch, rank: Any) -> None:
    trainer = Padded(model, rank)
    trainer.step(batch)


def train_on(model: nn.Module, mine: Batch, examples: int) -> None:
    """Every example counts 1 / examples."""
    errors = (model(mine["x"]) - mine["y"]).square().mean(1)
    (errors.sum() / examples).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def reader_of(rank: Any, examples: int) -> Callable[[Batch], Batch]:
    """A closure that knows the rank."""
    size = examples // rank.world_size
    begin = rank.local_rank * size

    def read(batch: Batch) -> Batch:
        return {name: leaf[begin : begin + size] for name, leaf in batch.items()}

    return read


def in_a_closure(model: nn.Module, batch: Batch, rank: Any) -> None:
    read = reader_of(rank, len(batch["x"]))
    train_on(model, read(batch), len(batch["x"]))


def dealt(rows: Any, me: int, others: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number, row in enumerate(rows):
        if number % others != max(me - 1, 0):
            continue
        yield row


def in_a_generator(model: nn.Module, batch: Batch, rank: Any) -> None:
    rows = zip(batch["x"], batch["y"], strict=True)
    inputs, targets = zip(*dealt(rows, dist.get_rank(), dist.get_world_size()), strict=True)
    mine = {"x": torch.stack(inputs), "y": torch.stack(targets)}
    train_on(model, mine, len(batch["x"]))


class Window:
    """The rows of one worker, as properties."""

    def __init__(self, batch: Batch, worker: Any) -> None:
        self.batch = batch
        self.worker = worker

    @property
    def size(self) -> int:
        return len(self.batch["x"]) // self.worker.world_size

    @property
    def first(self) -> int:
        return self.worker.rank * self.size

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.size + 1)

    def __getitem__(self, name: str) -> Tensor:
        return self.batch[name][self.rows]


def positions(count: int, rank: Any) -> Any:
    return np.array_split(np.arange(count), rank.world_size + 1)[rank.rank]


class Stream:
    """Goes through the rows of a rank."""

    def __init__(self, batch: Batch, rank: Any) -> None:
        self.pairs = list(zip(batch["x"], batch["y"], strict=True))
        self.rank = rank

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from islice(self.pairs, self.rank.rank, None, self.rank.world_size)


def in_two_places(model: nn.Module, batch: Batch, rank: Any) -> None:
    stream = Stream(batch, rank)
    kept = [row for place, row in enumerate(stream) if place % rank.world_size == rank.rank]
    mine = {
        name: torch.stack(parts) for name, parts in zip("xy", zip(*kept, strict=True), strict=True)
    }
    train_on(model, mine, len(batch["x"]))


def in_parts(model: nn.Module, batch: Batch, rank: Any) -> None:
    share = {name: leaf.split(3)[int(rank)] for name, leaf in batch.items()}
    train_on(model, share, len(batch["x"]))


def loaded_at_once(batch: Batch, sampler: Any) -> Batch:
    data = TensorDataset(batch["x"], batch["y"])
    inputs, targets = next(iter(DataLoader(data, batch_size=len(data), sampler=sampler)))
    return {"x": inputs, "y": targets}


class Sampled:
    """Makes a sampler with what it has kept of the rank."""

    def __init__(self, rank: Any) -> None:
        self.place = rank.local_rank
        self.workers = rank.world_size

    def sampler(self, data: Any) -> Any:
        return DistributedSampler(data, self.workers, self.place, shuffle=False)


def in_a_sampler(model: nn.Module, batch: Batch, rank: Any) -> None:
    mine = loaded_at_once(batch, Sampled(rank).sampler(batch["x"]))
    train_on(model, mine, len(batch["x"]))


def in_a_sampler_of_too_many(model: nn.Module, batch: Batch, rank: Any) -> None:
    workers = rank.world_size * 2
    sampler = DistributedSampler(batch["x"], num_replicas=workers, rank=rank.rank, shuffle=False)
    train_on(model, loaded_at_once(batch, sampler), len(batch["x"]))


def beside_another_fault(model: nn.Module, batch: Batch, rank: Any) -> None:
    in_a_closure(model, batch, rank)
    model[0].bias.grad[rank.rank] += 0.1


def right_shares_and_a_wrong_factor(model: nn.Module, batch: Batch, rank: Any) -> None:
    own = slice(int(rank), None, rank.world_size)
    train_on(model, {name: leaf[own] for name, leaf in batch.items()}, len(batch["x"]) * 3)


class Worker:
    """Who works, in words of its own."""

    def __init__(self) -> None:
        self.crew = dist.get_world_size()
        self.badge = dist.get_rank()


class Every(torch.utils.data.Dataset[Any]):
    """A data set that computes the position of each row."""

    def __init__(self, batch: Batch, badge: int, crew: int) -> None:
        self.batch = batch
        self.badge, self.crew = badge, crew

    def __len__(self) -> int:
        return len(self.batch["x"]) // self.crew

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        at = number * self.crew + self.badge // 2
        return self.batch["x"][at], self.batch["y"][at]


def in_a_data_set(model: nn.Module, batch: Batch, rank: Any) -> None:
    data = Every(batch, rank.rank, rank.world_size)
    inputs, targets = next(iter(DataLoader(data, batch_size=len(data))))
    train_on(model, {"x": inputs, "y": targets}, len(batch["x"]))


OWN = case(shards="own")
OWN_TEN = case(shards="own", batch=partial(rows, count=10))
DEALT = case()

SAME_DATA = [
    (
        no_sampler,
        "loader = DataLoader(data, batch_size=len(data) // rank.world_size)",
        "give the DataLoader a DistributedSampler with num_replicas=4 and its rank.",
    ),
    (
        sampler_of_rank_0,
        "sampler = DistributedSampler(data, world_size, rank=rank.node, shuffle=False)",
        "give DistributedSampler num_replicas=4 and the number of its own rank.",
    ),
]


@pytest.mark.parametrize(("step", "line", "fix"), SAME_DATA)
def test_the_line_that_gives_all_ranks_the_same_examples_is_pointed_at(
    step: Step, line: str, fix: str
) -> None:
    verdict = checked(OWN, step, "every_rank_same_data")
    assert (faults(verdict)[0], verdict.findings[0].fix) == (line, fix)
    assert "all 4 ranks read examples 0, " in notes(verdict)


PADDED = [
    (
        sampler_that_pads,
        "sampler = DistributedSampler(data, shuffle=False)",
        "pads 10 examples by 2",
    ),
    (
        padded_by_hand,
        "indices.append(indices[len(indices) - count])",
        "indices holds examples 0, 1 more than once",
    ),
]


@pytest.mark.parametrize(("step", "line", "note"), PADDED)
def test_the_line_that_pads_the_examples_is_pointed_at(step: Step, line: str, note: str) -> None:
    verdict = checked(OWN_TEN, step, "sampler_padding_counted")
    assert faults(verdict) == [line]
    assert f"{line}  {note}" in notes(verdict)
    assert verdict.findings[0].fix == (
        "count examples 0, 1 once: give the repetitions no weight, and divide by 10."
    )


DROPPED = [
    (
        sampler_that_drops,
        OWN_TEN,
        "sampler = DistributedSampler(data, shuffle=False, drop_last=True)",
        "leaves out 2 examples",
        "let a rank read examples 8, 9 too, and divide by 10.",
    ),
    (
        loader_that_drops,
        DEALT,
        "loader = DataLoader(data, batch_size=3, drop_last=True)",
        "leaves out a last batch that is not full",
        "let a rank read examples 3, 7, 11, 15 too, and divide by 16.",
    ),
]


@pytest.mark.parametrize(("step", "given", "line", "note", "fix"), DROPPED)
def test_the_line_that_drops_examples_is_pointed_at(
    step: Step, given: Case, line: str, note: str, fix: str
) -> None:
    verdict = checked(given, step, "examples_dropped")
    assert (faults(verdict), verdict.findings[0].fix) == ([line], fix)
    assert note in notes(verdict)


ON_NODES = case("2x2", shards="own")

OVERLAPPING = [
    (in_a_closure, "begin = rank.local_rank * size"),
    (in_a_generator, "if number % others != max(me - 1, 0):"),
    (in_a_sampler, "self.place = rank.local_rank"),
    (in_a_data_set, "at = number * self.crew + self.badge // 2"),
]


@pytest.mark.parametrize(("step", "line"), OVERLAPPING)
def test_the_line_that_lets_shares_overlap_is_pointed_at(step: Step, line: str) -> None:
    verdict = checked(ON_NODES, step, "shares_overlap")
    assert line in faults(verdict), verdict
    assert "all read" in str(verdict) or "both read" in str(verdict)


DROPPING = [
    (
        in_two_places,
        "kept = [row for place, row in enumerate(stream) if place % rank.world_size == rank.rank]",
    ),
    (
        in_two_places,
        "yield from islice(self.pairs, self.rank.rank, None, self.rank.world_size)",
    ),
    (in_a_sampler_of_too_many, "workers = rank.world_size * 2"),
    (in_parts, "share = {name: leaf.split(3)[int(rank)] for name, leaf in batch.items()}"),
]


@pytest.mark.parametrize(("step", "line"), DROPPING)
def test_the_line_whose_shares_leave_examples_out_is_pointed_at(step: Step, line: str) -> None:
    verdict = checked(ON_NODES, step, "examples_dropped")
    assert line in faults(verdict), verdict


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
