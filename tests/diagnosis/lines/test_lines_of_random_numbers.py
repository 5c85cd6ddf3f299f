"""A report about random numbers points at the lines of the user's code that draw them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, check
from tests.package.pointed_at import faulty_lines


class Layers(nn.Module):
    """Two linear layers. A subclass draws between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, rows: Tensor) -> Any:
        return self.last(self.changed(torch.tanh(self.first(rows))))

    def changed(self, hidden: Tensor) -> Tensor:
        return hidden


class Noisy(Layers):
    def changed(self, hidden: Tensor) -> Tensor:
        scale = torch.exp(hidden / 3)
        noise = torch.randn_like(hidden)
        return hidden + scale * noise


class DrawsWithNumpy(Layers):
    def changed(self, hidden: Tensor) -> Tensor:
        scales = np.random.uniform(0.5, 1.5, (len(hidden), 1))
        return hidden * torch.from_numpy(scales).to(hidden.dtype)


def squares(model: Callable[[Tensor], Tensor], rows: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(rows["x"]), rows["y"])


def at_a_random_time(model: Callable[[Tensor], Tensor], rows: dict[str, Tensor]) -> Tensor:
    times = torch.randint(1, 20, (len(rows["x"]), 1)) / 20
    return F.mse_loss(model(rows["x"] * times.to(rows["x"].dtype)), rows["y"])


def make_rows(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(12, 5, generator=generator),
        "y": torch.randn(12, 3, generator=generator),
    }


def case_of(model: Any, loss: Any = squares) -> Case:
    return Case(model=model, batch=make_rows, loss=loss, layout="1x2")


DRAWING = [
    (case_of(Noisy), squares, "noise = torch.randn_like(hidden)"),
    (case_of(DrawsWithNumpy), squares, "scales = np.random.uniform(0.5, 1.5, (len(hidden), 1))"),
    (
        case_of(Layers, at_a_random_time),
        at_a_random_time,
        'times = torch.randint(1, 20, (len(rows["x"]), 1)) / 20',
    ),
]


@pytest.mark.parametrize(("case", "loss", "line"), DRAWING)
def test_the_line_that_draws_is_shown(case: Case, loss: Any, line: str) -> None:
    def step(model: Any, shard: Any, rank: Any) -> None:
        ddp = DistributedDataParallel(model)
        loss(ddp, shard).backward()

    verdict = check(case, step, steps=2)  # the big batch cannot be given the numbers of two steps
    assert verdict.causes == ("dropout_differs_from_reference",), str(verdict)
    assert faulty_lines(verdict) == [line]
    assert "others for a shard than for the big batch" in verdict.findings[0].lines[0].note


def seeds_and_draws(model: Any, shard: Any, rank: Any) -> None:
    torch.manual_seed(3)
    ddp = DistributedDataParallel(model)
    squares(ddp, shard).backward()


def test_the_line_that_draws_the_same_numbers_everywhere_is_shown() -> None:
    verdict = check(case_of(Noisy), seeds_and_draws)
    assert verdict.causes == ("dropout_same_on_all_ranks",), str(verdict)
    assert faulty_lines(verdict) == ["torch.manual_seed(3)"]
    texts = [one.note for one in verdict.findings[0].lines]
    assert "draws the same numbers on every rank" in texts
