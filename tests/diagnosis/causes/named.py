"""What a report names, in the words of the source code of the step."""

from __future__ import annotations

import linecache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, check
from ddp_equivalence.diagnosis.diagnose import Finding
from ddp_equivalence.report.verdict import Verdict

ON_FOUR_RANKS = "2x2"

MARK = "# the fault"


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(24, 5, generator=generator),
        "targets": torch.randn(24, 3, generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"])


def case_of(**changes: Any) -> Case:
    """A small regression on two nodes with two ranks each."""
    fields: dict[str, Any] = {"model": build_model, "batch": make_batch, "loss": loss}
    return Case(**(fields | {"layout": ON_FOUR_RANKS} | changes))


def different(case: Case, step: Any, **options: Any) -> Verdict:
    """The verdict on a step that differs."""
    verdict = check(case, step, **options)
    assert verdict.outcome == "different", verdict
    return verdict


def first_finding(verdict: Verdict) -> Finding:
    """The explanation that the report believes first."""
    finding = verdict.findings[0]
    assert finding.accepted, verdict
    return finding


def faulty_lines(verdict: Verdict) -> list[str]:
    """The text of the lines that the first explanation calls faulty."""
    pointed = first_finding(verdict).lines
    return [_text(one.line.file, one.line.number) for one in pointed if one.is_fault]


def lines_shown(verdict: Verdict) -> list[str]:
    """The text of all lines that the first explanation shows."""
    return [_text(one.line.file, one.line.number) for one in first_finding(verdict).lines]


def accepted(verdict: Verdict) -> set[str]:
    """All causes that the report believes."""
    return {cause for one in verdict.findings if one.accepted for cause in one.causes}


def average(model: nn.Module, count: float) -> None:
    """Reduce as right code does, with this divisor."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= count


def assert_named(verdict: Verdict, cause: str, because: str = "") -> None:
    """The report believes this cause first, and shows the marked line as the only faulty one."""
    finding = first_finding(verdict)
    assert finding.cause == cause, verdict
    faulty = faulty_lines(verdict)
    assert len(faulty) == 1, verdict
    assert MARK in faulty[0], verdict
    assert because in finding.because, finding.because


def _text(file: str, number: int) -> str:
    return linecache.getline(file, number).strip()
