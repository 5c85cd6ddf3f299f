"""What a run remembers of each check: plain data, for the closing table and for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_equivalence.report.details import details_of

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict


@dataclass(frozen=True)
class Record:
    """One check. The fields are those of a case in the JSON results.

    ``id``: the test. ``backend``: the lane. ``expected``: the outcome that the test asks for.
    ``causes``: the accepted cause and all that cannot be told apart from it. ``error``, ``floor``
    and ``limit``: of the worst parameter, None where not finite or not measured. ``reason`` and
    ``unknown_because``: why nothing was shown, in words and as a value of ``UnknownBecause``.
    ``parameters``, ``elements``, ``ranks``: how much was compared. ``planted``: the fault that was
    planted on purpose, or "". ``known``: the case is known to differ. ``confirmed``: its test found
    that it differs in the known way. ``gpu``: the
    physical GPUs of all ranks in their order, with ", " between ranks; "" on the CPU.

    ``repairs``: the edits of the step with which every rank was seen to hold the gradients of the
    big batch, the most likely first: each with its ``file`` and ``line``, and the ``change`` in
    words, such as "with `a` in place of `b`".

    ``digests``: of the gradients of each rank, in their order, and ``details``, of an outcome that
    the test does not expect: only in a run that is recorded.

    ``report``, ``full_report``, ``headline`` (the first line of the report), ``file`` and ``line``
    (of the code to look at): only where the outcome is not "same", and only in a run that asks for
    them.
    """

    id: str
    strategy: str
    layout: str
    backend: str
    dtype: str
    expected: str
    outcome: str
    cause: str | None
    causes: tuple[str, ...]
    error: float | None
    floor: float | None
    limit: float | None
    seconds: float
    reason: str
    unknown_because: str | None
    lane_reason: str
    parameters: int
    elements: int
    ranks: int
    planted: str = ""
    known: bool = False
    confirmed: bool = False
    gpu: str = ""
    repairs: tuple[Mapping[str, str | int], ...] = ()
    digests: tuple[str, ...] = ()
    details: Mapping[str, Any] | None = None
    report: str = ""
    full_report: str = ""
    headline: str = ""
    file: str = ""
    line: int = 0

    @property
    def was_compared(self) -> bool:
        """True if the check reached a verdict, on a step that was not broken on purpose."""
        return not self.planted and self.outcome in ("same", "different")


def record_of(
    verdict: Verdict,
    test_id: str,
    expected: str,
    planted: str,
    with_floor: bool,
    with_report: bool = False,
    for_a_record: bool = False,
) -> Record:
    """The record of one verdict. Errors that are not finite become None, since JSON has none.

    ``with_floor``: include the rounding floor, which may have to be measured first.
    ``with_report``: include the texts of a verdict that is not "same". ``for_a_record``: include
    digests and details.
    """
    comparison = verdict.comparison
    texts = _texts(verdict) if with_report and verdict.outcome != "same" else {}
    return Record(
        id=test_id,
        strategy=verdict.subject,
        layout=verdict.case.layout,
        backend=verdict.lane.name,
        dtype=verdict.case.dtype_name,
        expected=expected,
        outcome=verdict.outcome,
        cause=verdict.cause,
        causes=tuple(
            name for finding in verdict.findings if finding.accepted for name in finding.causes
        ),
        error=_finite(verdict.error),
        floor=_finite(verdict.floor) if with_floor else None,
        limit=_finite(verdict.limit),
        seconds=round(verdict.seconds, 4),
        reason=verdict.reason,
        unknown_because=verdict.unknown_because and verdict.unknown_because.value,
        lane_reason=verdict.lane.reason,
        parameters=len(comparison.parameters) if comparison else 0,
        elements=comparison.elements if comparison else 0,
        ranks=len(comparison.ranks) if comparison else 0,
        planted=planted,
        gpu=", ".join(one.gpu for one in verdict.evidence.values() if one.gpu),
        repairs=tuple(
            {"file": one.line.file, "line": one.line.number, "change": one.text}
            for one in verdict.repairs.found
        ),
        digests=tuple(comparison.digests.values()) if comparison and for_a_record else (),
        details=details_of(verdict) if for_a_record and verdict.outcome != expected else None,
        **texts,
    )


def _texts(verdict: Verdict) -> dict[str, Any]:
    """What the report says, and the line that it points at."""
    from ddp_equivalence.report.short.screen import headline_text, line_to_look_at

    line = line_to_look_at(verdict)
    return {
        "report": str(verdict),
        "full_report": verdict.full_report(),
        "headline": headline_text(verdict),
        "file": "" if line is None else line.file,
        "line": 0 if line is None else line.number,
    }


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
