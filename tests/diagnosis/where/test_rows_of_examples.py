"""A line that joins values of different examples is shown with two of these examples.

Rows are told by what the loss of the case makes of the big batch and of the same batch in the
reverse order, so a weight that happens to have as many rows has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_equivalence import Case, check
from ddp_equivalence.diagnosis.where.relations import Rows
from ddp_equivalence.measurement.calls import Value
from tests.diagnosis.where.faulty import average, distance, unnamed

EXAMPLES = 12


class Scores(nn.Module):
    """Its layer has as many units as the batch has examples."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, EXAMPLES)
        self.head = nn.Linear(EXAMPLES, 3)

    def forward(self, rows: Tensor) -> Any:
        return self.head(torch.tanh(self.hidden(rows)))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(EXAMPLES, 6, generator=generator),
        "targets": torch.randn(EXAMPLES, 3, generator=generator),
        "weights": torch.rand(EXAMPLES, generator=generator) + 0.5,
        "lengths": torch.randperm(EXAMPLES, generator=generator) + 1,
    }


def weighted(scores: Tensor, examples: dict[str, Tensor]) -> Tensor:
    errors = (scores - examples["targets"]).square().mean(1)
    return (errors * examples["weights"] / examples["lengths"]).mean()


CASE = Case(
    model=Scores,
    batch=batch,
    loss=lambda model, examples: weighted(model(examples["rows"]), examples),
    layout="1x2",
)


def in_order(examples: dict[str, Tensor], left_out: str) -> dict[str, Tensor]:
    """The longest example comes first; what is left out stays where it is."""
    order = examples["lengths"].argsort(descending=True)
    return {name: x if name == left_out else x[order] for name, x in examples.items()}


def targets_stay(model: Any, shard: dict[str, Tensor], rank: Any) -> None:
    shard = in_order(shard, "targets")
    errors = (model(shard["rows"]) - shard["targets"]).square().mean(1)  # fault
    (errors * shard["weights"] / shard["lengths"]).mean().backward()
    average(model)


def weights_stay(model: Any, shard: dict[str, Tensor], rank: Any) -> None:
    shard = in_order(shard, "weights")
    errors = (model(shard["rows"]) - shard["targets"]).square().mean(1)
    (errors * shard["weights"] / shard["lengths"]).mean().backward()  # fault
    average(model)


def lengths_stay(model: Any, shard: dict[str, Tensor], rank: Any) -> None:
    shard = in_order(shard, "lengths")
    errors = (model(shard["rows"]) - shard["targets"]).square().mean(1)
    errors = errors * shard["weights"]
    (errors / shard["lengths"]).mean().backward()  # fault
    average(model)


def weights_of_the_first_half(model: Any, shard: dict[str, Tensor], rank: Any) -> None:
    weights: Any = None
    for half in (slice(0, len(shard["rows"]) // 2), slice(len(shard["rows"]) // 2, None)):
        part = {name: x[half] for name, x in shard.items()}
        weights = part["weights"] if weights is None else weights
        errors = (model(part["rows"]) - part["targets"]).square().mean(1)
        (errors * weights / part["lengths"]).mean().div(2).backward()  # fault
    average(model)


def split_over_ranks(model: Any, shard: dict[str, Tensor], rank: Any) -> None:
    """Does not run on one rank."""
    assert rank.world_size == 2, "this step needs two ranks"
    targets = shard["targets"].roll(1, 0)
    errors = (model(shard["rows"]) - targets).square().mean(1)  # fault
    (errors * shard["weights"] / shard["lengths"]).mean().backward()
    average(model)


@pytest.mark.parametrize(
    "step",
    [targets_stay, weights_stay, lengths_stay, weights_of_the_first_half, split_over_ranks],
)
def test_the_line_that_joins_different_examples_is_marked(step: Any) -> None:
    where = unnamed(CASE, step)
    assert where.lines[0].is_fault
    assert distance(replace(where, lines=where.lines[:1]), step) == 0
    assert "joins the row of example " in where.lines[0].note


def rolled_apart(model: Any, shard: dict[str, Tensor], rank: Any) -> None:
    """Joins neighbours, as the loss of its case does, and has another fault."""
    scores = model(shard["rows"])
    errors = (scores - 1.1 * shard["targets"].roll(1, 0)).square().mean(1)  # fault
    (errors * shard["weights"] / shard["lengths"]).mean().backward()


def test_examples_that_the_loss_joins_as_well_are_not_told() -> None:
    def neighbours(model: Any, examples: Any) -> Any:
        errors = (model(examples["rows"]) - examples["targets"].roll(1, 0)).square().mean(1)
        return (errors * examples["weights"] / examples["lengths"]).mean()

    verdict = check(replace(CASE, loss=neighbours, layout="1x1"), rolled_apart)
    assert verdict.outcome == "different"
    assert "joins the row" not in str(verdict)


def test_rows_are_those_of_what_is_reversed_with_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(4, 3, generator=generator), torch.randn(4, 3, generator=generator)
    whole = [Value.of(rows), Value.of(weight)]
    backwards = [Value.of(rows.flip(0)), Value.of(weight)]
    known = Rows(whole, backwards, [(whole, range(4))], 1e-16)
    assert known.of(Value.of(2 * rows[[2, 0]])) == (frozenset({2}), frozenset({0}))
    assert known.of(Value.of(weight)) is None
    assert known.of(Value.of(torch.cat([rows[:1], weight[:1]]))) is None
    assert Rows().of(Value.of(rows)) is None
