"""What a report points at, and a case for steps whose faulty line is marked by a comment."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, check
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.report.verdict import Verdict

MARK = "# the fault"

Rows = dict[str, Tensor]
Step = Callable[[nn.Module, Any, Any], Any]


def build_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def make_rows(generator: torch.Generator, count: int = 16) -> Rows:
    return {
        "x": torch.randn(count, 6, generator=generator, dtype=torch.float64),
        "y": torch.randn(count, 3, generator=generator, dtype=torch.float64),
    }


def mean_loss(model: nn.Module, rows: Rows) -> Tensor:
    return F.mse_loss(model(rows["x"]), rows["y"])


def sum_loss(model: nn.Module, rows: Rows) -> Tensor:
    return F.mse_loss(model(rows["x"]), rows["y"], reduction="sum")


def marked_case(layout: str = "2x2", **changes: Any) -> Case:
    fields: dict[str, Any] = {"model": build_net, "batch": make_rows, "loss": mean_loss}
    return Case(**(fields | {"layout": layout, "dtype": torch.float64} | changes))


def judged(step: Any, **changes: Any) -> Verdict:
    """The verdict on a step, with the case changed like this."""
    return check(marked_case(**changes), step)


def checked(case: Case, step: Step, cause: str) -> Verdict:
    """The verdict of a check whose difference has this name, and no other."""
    verdict = check(case, step)
    assert (verdict.outcome, verdict.causes) == ("different", (cause,)), verdict
    return verdict


def text_of(pointed: PointedLine) -> str:
    """The line as it stands in its file."""
    return linecache.getline(pointed.line.file, pointed.line.number).strip()


def lines_shown(verdict: Verdict) -> list[str]:
    """The text of all lines that the first finding shows."""
    return [text_of(one) for one in verdict.findings[0].lines]


def faulty_lines(verdict: Verdict) -> list[str]:
    """The text of the lines that the first finding calls the fault."""
    return [text_of(one) for one in verdict.findings[0].lines if one.is_fault]


def notes(verdict: Verdict) -> str:
    """The lines of the first finding with what is said of each, one below the other."""
    return "\n".join(f"{text_of(one)}  {one.note}" for one in verdict.findings[0].lines)


def assert_points_at_the_fault(verdict: Verdict, cause: str, fix: str) -> None:
    """The cause is named, the one line marked by a comment is its fault, and the fix says this."""
    assert verdict.cause == cause, str(verdict)
    faulty = faulty_lines(verdict)
    assert len(faulty) == 1, shown(verdict)
    assert MARK in faulty[0], shown(verdict)
    assert fix in verdict.findings[0].fix, shown(verdict)


def shown(verdict: Verdict) -> str:
    """What the first finding says and points at, for the message of a failing test."""
    finding = verdict.findings[0]
    lines = [
        f"{'->' if one.is_fault else '  '} {linecache.getline(one.line.file, one.line.number)!r} "
        f"{one.note} [{one.missing}]"
        for one in finding.lines
    ]
    return "\n".join([f"{verdict.causes}: {finding.headline}", *lines, f"Fix: {finding.fix}"])
