"""A report about a property of the model or the loss points at the module or the line that has it,
and says that it is no fault.
"""

# mypy: disable-error-code="arg-type, operator, union-attr, assignment, index, misc, var-annotated"
# Users write their steps without asking whether there is a gradient.

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, check
from tests.diagnosis.names.small_case import average
from tests.package.pointed_at import Rows, Step, checked, faulty_lines, marked_case, notes


class Normalised(nn.Module):
    """A linear layer, a batch norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        hidden = torch.relu(hidden)
        hidden = self.norm(hidden)
        outputs: Tensor = self.head(hidden)
        return outputs


class Dropping(nn.Module):
    """A linear layer, dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = self.drop(hidden)
        outputs: Tensor = self.head(hidden)
        return outputs


def one_pass(model: nn.Module, batch: Rows, rank: Any) -> None:
    model.train()
    outputs = model(batch["x"])
    loss = F.mse_loss(outputs, batch["y"])
    loss.backward()
    average(model, rank.world_size)


def with_ddp(model: nn.Module, batch: Rows, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    loss = F.mse_loss(ddp(batch["x"]), batch["y"])
    loss.backward()


def seeded_alike(model: nn.Module, batch: Rows, rank: Any) -> None:
    torch.manual_seed(rank.rank)
    torch.randn(3)
    torch.manual_seed(1234)
    one_pass(model, batch, rank)


def compared(model: nn.Module, batch: Rows) -> Tensor:
    """Each example must be nearer to its own target than to those of the others."""
    outputs = F.normalize(model(batch["x"]), dim=1)
    targets = F.normalize(batch["y"], dim=1)
    similar = outputs @ targets.T
    labels = torch.arange(len(outputs))
    return F.cross_entropy(similar / 0.5, labels)


class Gathering:
    """Computes one loss from the outputs of all ranks."""

    def __init__(self, model: nn.Module, rank: Any) -> None:
        self.model, self.rank = model, rank

    def gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.rank.world_size)]
        dist.all_gather(parts, tensor)
        parts[self.rank.rank] = tensor
        return torch.cat(parts)

    def loss(self, batch: Rows) -> Tensor:
        outputs = self.model(batch["x"])
        outputs = self.gather(outputs)
        targets = self.gather(batch["y"])
        similar = F.normalize(outputs, dim=1) @ F.normalize(targets, dim=1).T
        return F.cross_entropy(similar / 0.5, torch.arange(len(similar)))


def gathers_without_gradient(model: nn.Module, batch: Rows, rank: Any) -> None:
    gathering = Gathering(model, rank)
    gathering.loss(batch).backward()
    average(model, rank.world_size)


def catalogue_loss(model: nn.Module, batch: Rows) -> Tensor:
    """The same as the catalogue's loss on batch statistics, as a user would write it."""
    outputs = model(batch["inputs"])
    error = F.mse_loss(outputs, batch["targets"])
    variance = outputs.var(dim=0, unbiased=False)
    penalty = 0.25 * (1 - variance).square().mean()
    total: Tensor = error + penalty
    return total


def penalises_the_variance(model: nn.Module, batch: Rows, rank: Any) -> None:
    loss = catalogue_loss(model, batch)
    loss.backward()
    average(model, rank.world_size)


class Functional(nn.Module):
    """Two linear layers, and the function of torch that drops some of what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(8, 3)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.drop(self.first(inputs))
        hidden = F.dropout(hidden, 0.4, self.training)
        outputs: Tensor = self.head(hidden)
        return outputs


NORMALISED = marked_case("1x4", model=Normalised)
DROPPING = marked_case("1x4", model=Dropping)
FUNCTIONAL = marked_case("1x4", model=Functional)
COMPARED = marked_case("1x4", loss=compared)
STATISTICS = Case(model="mlp", loss="batch_statistics", layout="1x4")

PROPERTIES = [
    (
        NORMALISED,
        one_pass,
        "batch_norm_local_statistics",
        "hidden = self.norm(hidden)",
        "BatchNorm1d norm normalises over the examples of one rank or micro-batch: a property of "
        "the model, no fault",
    ),
    (
        NORMALISED,
        with_ddp,
        "batch_norm_local_statistics",
        "hidden = self.norm(hidden)",
        "a property of the model, no fault",
    ),
    (
        STATISTICS,
        penalises_the_variance,
        "batch_statistics_local",
        "variance = outputs.var(dim=0, unbiased=False)",
        "statistics of one rank's examples: a property of the loss, no fault",
    ),
]


@pytest.mark.parametrize(("given", "step", "cause", "line", "note"), PROPERTIES)
def test_a_property_is_shown_where_the_forward_pass_or_the_loss_has_it(
    given: Case, step: Step, cause: str, line: str, note: str
) -> None:
    verdict = checked(given, step, cause)
    assert faulty_lines(verdict) == [line]
    assert note in notes(verdict)


def test_the_line_that_gives_all_ranks_one_seed_is_pointed_at() -> None:
    verdict = checked(DROPPING, seeded_alike, "dropout_same_on_all_ranks")
    assert faulty_lines(verdict) == ["torch.manual_seed(1234)"]
    assert "hidden = self.drop(hidden)  Dropout drop drops the same positions" in notes(verdict)


def test_the_gather_that_loses_the_gradient_is_pointed_at() -> None:
    verdict = checked(COMPARED, gathers_without_gradient, "gather_without_gradient")
    assert faulty_lines(verdict) == ["dist.all_gather(parts, tensor)"]
    assert "12 elements, which require a gradient; what it returns has none" in notes(verdict)


def test_dropout_is_shown_where_the_big_batch_cannot_be_given_its_masks() -> None:
    verdict = check(FUNCTIONAL, one_pass, steps=2)
    assert verdict.causes == ("dropout_differs_from_reference",), verdict
    assert faulty_lines(verdict) == ["hidden = F.dropout(hidden, 0.4, self.training)"]
    assert "dropout draws other masks for a shard than for the big batch" in notes(verdict)


def test_dropout_of_a_module_is_compared_with_the_masks_of_the_ranks_or_without_any() -> None:
    assert check(DROPPING, with_ddp).outcome == "same"
    assert check(DROPPING, with_ddp, steps=2).outcome == "same"
