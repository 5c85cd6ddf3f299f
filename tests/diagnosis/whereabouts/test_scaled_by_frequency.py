"""An embedding that counts rows on each rank alone is shown, with the line that makes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_equivalence import Case, Rank
from ddp_equivalence.report.short.screen import source_of
from tests.diagnosis.whereabouts.faulty import average, unnamed


class Counting(nn.Module):
    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.rows: nn.Module = nn.Embedding(7, 4, scale_grad_by_freq=counts)
        self.head = nn.Linear(4, 2)

    def forward(self, numbers: Tensor) -> Any:
        return self.head(self.rows(numbers))


class CountingBags(Counting):
    def __init__(self) -> None:
        super().__init__(counts=False)
        self.rows = nn.EmbeddingBag(
            7,
            4,
            scale_grad_by_freq=True,
        )


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "numbers": torch.randint(7, (16, 3), generator=generator),
        "targets": torch.randn(16, 1, 2, generator=generator),
    }


def loss(model: Any, rows: dict[str, Tensor]) -> Any:
    output = model(rows["numbers"]).view(len(rows["numbers"]), -1, 2)
    return (output - rows["targets"]).square().mean()


def step(model: nn.Module, rows: dict[str, Tensor], rank: Rank) -> None:
    loss(model, rows).backward()
    average(model)


def step_with_a_wrong_head(model: Counting, rows: dict[str, Tensor], rank: Rank) -> None:
    step(model, rows, rank)
    assert model.head.weight.grad is not None
    model.head.weight.grad *= 1.5


@pytest.mark.parametrize("model", [Counting, CountingBags])
def test_an_embedding_that_counts_its_own_rows_is_named(model: type[nn.Module]) -> None:
    found = unnamed(Case(model=model, batch=batch, loss=loss, layout="1x2"), step)
    assert found.headline == "an embedding counts rows on each rank alone"
    assert found.parameters == ("rows.weight",)
    assert found.lines
    assert all("scale_grad_by_freq" in source_of(one.line) for one in found.lines)


def test_it_is_not_blamed_for_other_parameters() -> None:
    case = Case(model=Counting, batch=batch, loss=loss, layout="1x2")
    assert "counts rows" not in unnamed(case, step_with_a_wrong_head).headline
