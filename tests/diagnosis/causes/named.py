"""What a report names, in the words of the source code of the step."""

from __future__ import annotations

from functools import partial
from typing import Any

from ddp_equivalence import Case, check
from ddp_equivalence.diagnosis.diagnose import Finding
from ddp_equivalence.report.verdict import Verdict
from tests.diagnosis.names.small_case import case
from tests.package.own_cases import make_batch
from tests.package.pointed_at import MARK, faulty_lines


def case_of(**changes: Any) -> Case:
    """A small regression on two nodes with two ranks each."""
    fields: dict[str, Any] = {"layout": "2x2", "batch": partial(make_batch, count=24)}
    return case(**(fields | changes))


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


def accepted(verdict: Verdict) -> set[str]:
    """All causes that the report believes."""
    return {cause for one in verdict.findings if one.accepted for cause in one.causes}


def assert_named(verdict: Verdict, cause: str, because: str = "") -> None:
    """The report believes this cause first, and shows the marked line as the only faulty one."""
    finding = first_finding(verdict)
    assert finding.cause == cause, verdict
    faulty = faulty_lines(verdict)
    assert len(faulty) == 1, verdict
    assert MARK in faulty[0], verdict
    assert because in finding.because, finding.because
