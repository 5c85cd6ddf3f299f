"""What a report points at, and a case for steps whose faulty line is marked by a comment."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, check
from ddp_equivalence.report.verdict import Verdict

EXAMPLES = 16

MARK = "# the fault"

Rows = dict[str, Tensor]


def build_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def make_rows(generator: torch.Generator) -> Rows:
    return {
        "x": torch.randn(EXAMPLES, 6, generator=generator, dtype=torch.float64),
        "y": torch.randn(EXAMPLES, 3, generator=generator, dtype=torch.float64),
    }


def mean_loss(model: nn.Module, rows: Rows) -> Tensor:
    return F.mse_loss(model(rows["x"]), rows["y"])


def sum_loss(model: nn.Module, rows: Rows) -> Tensor:
    return F.mse_loss(model(rows["x"]), rows["y"], reduction="sum")


def marked_case(**changes: Any) -> Case:
    fields: dict[str, Any] = {"model": build_net, "batch": make_rows, "loss": mean_loss}
    return Case(**(fields | {"layout": "2x2", "dtype": torch.float64} | changes))


def judged(step: Any, **changes: Any) -> Verdict:
    """The verdict on a step, with the case changed like this."""
    return check(marked_case(**changes), step)


def halves(rows: Rows) -> list[Rows]:
    """The rows as two micro-batches."""
    size = len(rows["x"]) // 2
    first = {name: one[:size] for name, one in rows.items()}
    return [first, {name: one[size:] for name, one in rows.items()}]


def quarters(rows: Rows) -> list[Rows]:
    """The rows as four micro-batches."""
    return [quarter for half in halves(rows) for quarter in halves(half)]


def when_done(work: Any, change: Callable[[Any], Tensor]) -> torch.futures.Future[Tensor]:
    """What a communication hook returns: its collective's result, once it is there, changed."""
    future: torch.futures.Future[Tensor] = work.get_future().then(change)
    return future


def faulty_lines(verdict: Verdict) -> list[str]:
    """The text of the lines that the first finding calls the fault, as they stand in the file."""
    return [
        linecache.getline(one.line.file, one.line.number).strip()
        for one in verdict.findings[0].lines
        if one.is_fault
    ]


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
