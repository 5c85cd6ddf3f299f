"""State that no gradient reaches is part of what a step leaves, if the next gradient reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check

CODES = 6


class Moving(nn.Module):
    """Reads a state, and moves it by its rows; ``reduces``: by those of all ranks."""

    def __init__(self, reduces: bool) -> None:
        super().__init__()
        self.reduces = reduces
        self.layer = nn.Linear(4, 3)
        self.make()

    centre: Tensor

    def make(self) -> None:
        self.register_buffer("centre", torch.randn(3))

    def mean(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            mean: Tensor = values.mean(0)
            if self.reduces and dist.is_initialized():
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
        return mean

    def forward(self, rows: Tensor) -> Tensor:
        values: Tensor = self.layer(rows)
        centre = self.centre
        self.centre = 0.9 * centre + 0.1 * self.mean(values)
        return torch.tanh(values - centre)


class Codebook(Moving):
    """A codebook that an exponential average moves, as in vector quantisation."""

    codes: Tensor

    def make(self) -> None:
        self.register_buffer("codes", torch.randn(CODES, 3))

    def forward(self, rows: Tensor) -> Tensor:
        values: Tensor = self.layer(rows)
        nearest = torch.cdist(values, self.codes).argmin(1)
        chosen = F.one_hot(nearest, CODES).to(values.dtype)
        found = self.codes[nearest]
        moved = self.mean(chosen[:, :, None] * (values[:, None] - self.codes))
        self.codes.add_(0.1 * moved)
        return values + (found - values).detach() + (values - found) ** 2


class PlainAttribute(Moving):
    """The state is a tensor that the module keeps, and no buffer."""

    def make(self) -> None:
        self.centre = torch.randn(3, dtype=torch.float64)


class OnlyCounted(Moving):
    """State that is never read: a count of rows, and the rows themselves."""

    rows: Tensor

    def make(self) -> None:
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        self.rows += len(rows)
        self.last_rows = rows.detach()
        values: Tensor = self.layer(rows)
        return values


class Counted(Moving):
    """Counts its calls, two by two, and has another loss after each pair."""

    calls: Tensor

    def make(self) -> None:
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        pairs = (self.calls / 2).floor()
        self.calls += 1
        values: Tensor = self.layer(rows)
        return values * (1 + pairs)


class ReadInEvaluation(Moving):
    """Running statistics of the rank's own rows, which training does not read, as in batch norm."""

    def forward(self, rows: Tensor) -> Tensor:
        values: Tensor = self.layer(rows)
        if not self.training:
            return values - self.centre
        self.centre = 0.9 * self.centre + 0.1 * values.detach().mean(0)
        return values


STATES = {
    Moving: "centre",
    Codebook: "codes",
    PlainAttribute: "centre",
}


def make_batch(generator: torch.Generator) -> Tensor:
    return torch.randn(12, 4, generator=generator)


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    value: Tensor = model(rows).square().mean()
    return value


def case_of(kind: Any, reduces: bool) -> Case:
    build: Callable[[], nn.Module] = lambda: kind(reduces)  # noqa: E731
    return Case(model=build, batch=make_batch, loss=loss, layout="1x2")


def step(model: nn.Module, rows: Tensor, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, rows).backward()


def train(model: nn.Module, rank: Rank) -> Callable[[Tensor], None]:
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def one_step(rows: Tensor) -> None:
        optimizer.zero_grad()
        loss(ddp, rows).backward()
        optimizer.step()

    return one_step


@pytest.mark.parametrize("kind", STATES)
def test_state_that_each_rank_moves_by_its_own_rows_is_a_difference(kind: Any) -> None:
    verdict = check(case_of(kind, reduces=False), step)
    assert (verdict.outcome, verdict.cause) == ("different", "buffers_differ_from_big_batch")
    assert verdict.comparison is not None
    assert verdict.comparison.same, "the gradients of this step are right"
    assert STATES[kind] in str(verdict)


@pytest.mark.parametrize("kind", [*STATES, OnlyCounted, ReadInEvaluation])
def test_state_that_is_reduced_or_never_read_is_right(kind: Any) -> None:
    verdict = check(case_of(kind, reduces=True), step)
    assert verdict.outcome == "same", verdict


def test_the_line_that_moves_the_state_is_marked() -> None:
    report = str(check(case_of(Codebook, reduces=False), step))
    (marked,) = [line for line in report.splitlines() if line.startswith(">")]
    assert "self.codes.add_(0.1 * moved)" in marked


def test_state_that_is_changed_once_for_each_micro_batch_is_not_said_to_need_a_reduction() -> None:
    def accumulates(model: nn.Module, rows: Tensor, rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        with ddp.no_sync():
            (loss(ddp, rows[::2]) / 2).backward()
        (loss(ddp, rows[1::2]) / 2).backward()

    verdict = check(case_of(Counted, reduces=True), accumulates)
    assert verdict.cause == "buffers_differ_from_big_batch", verdict
    assert "own rows" not in str(verdict)
    assert "as often as the big batch" in " ".join(str(verdict).split())


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_it_is_a_difference_of_a_trainer_too(steps: int) -> None:
    wrong = check(case_of(Codebook, reduces=False), train, compare="update", steps=steps)
    assert wrong.outcome == "different", wrong
    right = check(case_of(Codebook, reduces=True), train, compare="update", steps=steps)
    assert right.outcome == "same", right
