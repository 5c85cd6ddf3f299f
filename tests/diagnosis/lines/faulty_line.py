"""What the tests of pointed lines ask of a check."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence import Case, check
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.report.verdict import Verdict

Step = Callable[[nn.Module, Any, Any], None]


def rows(generator: torch.Generator, count: int = 16) -> dict[str, Tensor]:
    """A batch with inputs of 6 numbers and targets of 3."""
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return {"x": inputs, "y": torch.randn(count, 3, generator=generator, dtype=torch.float64)}


def mean_squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all examples."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def three_layers() -> nn.Module:
    """A model with parameters of different sizes."""
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    ).double()


def case(layout: str = "1x4", **more: Any) -> Case:
    """A case of this module's model, batch and loss, unless others are given."""
    parts: dict[str, Any] = {"model": three_layers, "batch": rows, "loss": mean_squares}
    return Case(layout=layout, **{**parts, **more})


def checked(given: Case, step: Step, cause: str) -> Verdict:
    """The verdict of a check whose difference has this name, and no other."""
    verdict = check(given, step)
    assert (verdict.outcome, verdict.causes) == ("different", (cause,)), verdict
    return verdict


def text_of(pointed: PointedLine) -> str:
    """The line as it stands in its file."""
    return linecache.getline(pointed.line.file, pointed.line.number).strip()


def faults(verdict: Verdict) -> list[str]:
    """The texts of the lines that the report calls faulty."""
    return [text_of(line) for line in verdict.findings[0].lines if line.is_fault]


def notes(verdict: Verdict) -> str:
    """What the report says of the lines that it points at, one below the other."""
    return "\n".join(f"{text_of(one)}  {one.note}" for one in verdict.findings[0].lines)
