"""Verdict -> text: verdict and name, cause, argument, picture, numbers, what else was considered,
evidence, how to repeat. A reader may stop after any block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddp_equivalence.report.argument import argument_lines
from ddp_equivalence.report.cause import cause_lines
from ddp_equivalence.report.considered import considered_lines
from ddp_equivalence.report.evidence import evidence_lines
from ddp_equivalence.report.failure import failure_blocks
from ddp_equivalence.report.parameters import parameters_lines, structure_lines
from ddp_equivalence.report.shares import shares_lines
from ddp_equivalence.report.wrapping import of_ranks, wrapped

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict

OUTPUT_LINES = 30


def render(verdict: Verdict) -> str:
    """The whole report."""
    blocks = {
        "same": _same,
        "different": _different,
        "unknown": _unknown,
    }[verdict.outcome]
    text = ("\n".join(line.rstrip() for line in block) for block in blocks(verdict) if block)
    return "\n\n".join(text) + "\n"


def _error_line(error: float | None, floor: float | None, limit: float | None) -> str:
    """``error 3.1e-07  floor 2.4e-07  limit 2.0e-06``."""
    if error is None or limit is None:
        return "nothing compared"
    between = "" if floor is None else f"  floor {floor:.1e}"
    return f"error {error:.1e}{between}  limit {limit:.1e}"


def _same(verdict: Verdict) -> Iterator[list[str]]:
    comparison = verdict.comparison
    assert comparison is not None
    yield [f"{verdict.subject} is big_batch: same"]
    line = _error_line(verdict.error, verdict.floor, verdict.limit)
    if verdict.nearest is not None:
        line += f"  nearest planted fault {verdict.nearest.distance:.1e}"
    worst = comparison.worst
    reason = f"limit: {worst.limit.reason}; worst parameter: {worst.name}" if worst else ""
    if verdict.nearest is not None:
        reason += f"; nearest fault: {verdict.nearest.cause}"
    yield [f"  {line}", *wrapped(reason, "  ")]
    yield evidence_lines(verdict)


def _different(verdict: Verdict) -> Iterator[list[str]]:
    named = " and ".join(verdict.causes) or "no known cause fits"
    yield [f"{verdict.subject} is not big_batch: {named}"]
    yield cause_lines(verdict)
    yield argument_lines(verdict)
    yield structure_lines(verdict)
    yield shares_lines(verdict)
    yield parameters_lines(verdict)
    yield [*considered_lines(verdict), *evidence_lines(verdict)]
    yield _outputs(verdict)


def _unknown(verdict: Verdict) -> Iterator[list[str]]:
    yield [f"{verdict.subject} against big_batch: unknown"]
    if verdict.failure is not None:
        yield from failure_blocks(verdict.failure, verdict.reason, verdict.second_look)
        yield _outputs(verdict)
    else:
        yield [
            *wrapped(f"{verdict.reason[:1].upper()}{verdict.reason[1:]}.", "  "),
            "  Nothing was shown, which is not a pass.",
        ]
        if verdict.comparison is not None and verdict.comparison.parameters:
            line = _error_line(verdict.error, verdict.floor, verdict.limit)
            yield [f"  {line}"]
    yield evidence_lines(verdict)


def _outputs(verdict: Verdict) -> list[str]:
    said: dict[str, list[int]] = {}
    for rank, text in sorted(verdict.output.items()):
        if text.strip():
            said.setdefault(text.rstrip(), []).append(rank)
    lines = []
    for text, ranks in said.items():
        shown = text.splitlines()[-OUTPUT_LINES:]
        lines += [f"  Output of {of_ranks(ranks)}", *(f"    | {line}" for line in shown)]
    return lines
