"""Steps that make other rows of the examples, and say by ``rank.read`` which examples they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.measurement.returned import DeclaredRows
from ddp_equivalence.report.verdict import Verdict
from tests.package.own_cases import EXAMPLES, make_batch
from tests.package.own_trainers import STEPS, adamw

AS_TRAINER: Any = {"compare": "update", "optimizer": adamw, "steps": STEPS}
OF_A_STEP = EXAMPLES // STEPS


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def prepared_again(rows: Tensor) -> Tensor:
    """Rows as a model gets them of which nothing shows from which examples they were made."""
    return torch.sin(7 * rows).cumsum(1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(prepared_again(batch["rows"])), batch["targets"])


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2", shards="own")


class Trainer:
    """Shuffles all examples alike on both ranks; ``says`` tells which of them each rank reads."""

    drops = 0

    def __call__(self, model: nn.Module, batch: dict[str, Tensor], rank: Rank) -> None:
        ddp = DistributedDataParallel(model)
        optimizer = adamw(list(ddp.parameters()))
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(1))
        for rows in order.split(OF_A_STEP):
            own = rows.chunk(rank.world_size)[rank]
            read = own[: len(own) - self.drops]
            self.says(rank, read)
            optimizer.zero_grad()
            loss(ddp, {name: leaf[read] for name, leaf in batch.items()}).backward()
            optimizer.step()

    def says(self, rank: Rank, rows: Tensor) -> None:
        rank.read(rows)


class SaysNothing(Trainer):
    def says(self, rank: Rank, rows: Tensor) -> None: ...


class SaysOthers(Trainer):
    def says(self, rank: Rank, rows: Tensor) -> None:
        rank.read((rows + 1) % EXAMPLES)


class DropsExamples(Trainer):
    drops = 1


def judged(trainer: object) -> Verdict:
    step: Any = trainer
    return check(case, step, **AS_TRAINER)


def test_rows_that_are_made_anew_are_followed_in_the_order_that_is_declared() -> None:
    verdict = judged(Trainer())
    assert (verdict.outcome, bool(verdict.read_order)) == ("same", True)


def test_without_it_another_order_is_a_difference() -> None:
    verdict = judged(SaysNothing())
    assert (verdict.outcome, bool(verdict.read_order)) == ("different", False)


def test_to_declare_other_examples_makes_nothing_the_same() -> None:
    assert judged(SaysOthers()).outcome == "different"


def test_examples_that_a_trainer_drops_are_named() -> None:
    verdict = judged(DropsExamples())
    assert verdict.cause == "examples_dropped"
    assert verdict.read_order


def drops_one(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    """Drops the last example of rank 1. The positions are those of the shard."""
    rows = torch.arange(len(shard["rows"]) - int(rank))
    rank.read(rows)
    read = {name: leaf[rows] for name, leaf in shard.items()}
    ddp = DistributedDataParallel(model)
    loss(ddp, read).backward()


def test_positions_are_those_of_what_the_step_was_given() -> None:
    verdict = check(Case(model=build_model, batch=make_batch, loss=loss, layout="1x2"), drops_one)
    assert verdict.cause == "examples_dropped"
    assert f"example {EXAMPLES - 1}" in str(verdict)
    read = f"{EXAMPLES - 1} of {EXAMPLES} examples read, example {EXAMPLES - 1} never"
    assert read in " ".join(verdict.full_report().split())


def recognised(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    """Names other examples than those that the model is called with, as everybody can see."""
    rows = torch.arange(len(shard["rows"]) - int(rank))
    rank.read([0] * len(rows))
    ddp = DistributedDataParallel(model)
    outputs = ddp(shard["rows"][rows])
    F.mse_loss(outputs, shard["targets"][rows]).backward()


def plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"])


def test_rows_that_are_recognised_count_whatever_is_declared() -> None:
    own = Case(model=build_model, batch=make_batch, loss=plain_loss, layout="1x2")
    verdict = check(own, recognised)
    assert verdict.cause == "examples_dropped"
    assert "rank.read" not in " ".join(verdict.full_report().split()).partition("Evidence")[2]


class Declares:
    """A step that declares something, and is right otherwise."""

    def __init__(self, indices: object) -> None:
        self.indices = indices

    def __call__(self, model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
        given: Any = self.indices
        rank.read(given)
        ddp = DistributedDataParallel(model)
        loss(ddp, shard).backward()


@pytest.mark.parametrize(
    "indices", [[0, 1], np.arange(2), torch.arange(2), range(2), (np.int64(1),)], ids=repr
)
def test_positions_may_be_numbers_of_python_numpy_and_torch(indices: Sequence[int]) -> None:
    dealt = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")
    assert check(dealt, Declares(indices)).outcome == "same"


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 6], "given 6; it takes positions, counted from 0, in the batch of this step, which"),
        ([-1], "given -1; it takes positions, counted from 0"),
        ([0.5], "given [0.5]; it takes the positions of examples, whole numbers in one dimension"),
        (torch.tensor([True, False]), "those of a mask are mask.nonzero()[:, 0]"),
        (torch.zeros(2, 2, dtype=torch.int64), "whole numbers in one dimension"),
        (3, "given 3; it takes the positions of examples"),
    ],
    ids=["too large", "negative", "fraction", "mask", "two dimensions", "one number"],
)
def test_what_is_no_position_is_refused_in_the_first_run(indices: object, message: str) -> None:
    dealt = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2")
    verdict = check(dealt, Declares(indices))
    assert verdict.outcome == "unknown"
    assert message in " ".join(str(verdict).split())


def test_outside_of_a_check_nobody_listens() -> None:
    rank, declared = Rank(0, 1, 0, 1, 0, 1, torch.device("cpu"), "gloo"), DeclaredRows([(0, 1)])
    with declared.listening():
        declared.begin(0)
        with pytest.raises(ValueError, match=r"rank\.read was given 2"):
            rank.read([2])
    rank.read([2])
    assert declared.or_recognised(None) is None
