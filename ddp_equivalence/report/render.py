"""Verdict -> text, in blocks: name, cause, argument, shares, numbers, other causes, evidence, and
how to repeat it. A reader may stop after any block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_equivalence.case import settings
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.cause import (
    cause_lines,
    fresh_ranks_lines,
    other_causes_lines,
    precision_lines,
    random_number_lines,
    without_dropout_lines,
)
from ddp_equivalence.report.evidence import evidence_lines
from ddp_equivalence.report.failure import failure_blocks
from ddp_equivalence.report.numbers import (
    expected_and_held_lines,
    parameters_lines,
    shares_lines,
    structure_lines,
)
from ddp_equivalence.report.short.screen import short_lines, training_notes
from ddp_equivalence.report.text import Line, Style, labelled, paragraph, rank_names

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict

OUTPUT_LINES = 30


def render(verdict: Verdict) -> str:
    """The report as plain text: of a difference one screen, unless the run asks for everything."""
    return "".join(f"{line.text}\n" for line in report_lines(verdict))


def render_full(verdict: Verdict) -> str:
    """All that is known, as plain text."""
    return "".join(f"{line.text}\n" for line in full_lines(verdict))


def report_lines(verdict: Verdict) -> Iterator[Line]:
    """The report, line by line."""
    if verdict.outcome == "different" and not settings.current().full_report:
        yield from (replace(line, text=line.text.rstrip()) for line in short_lines(verdict))
    else:
        yield from full_lines(verdict)


def full_lines(verdict: Verdict) -> Iterator[Line]:
    """All that is known, line by line, with an empty line between two blocks.

    Of a difference, the short report comes first.
    """
    if verdict.outcome == "different":
        yield from (replace(line, text=line.text.rstrip()) for line in short_lines(verdict))
        yield Line("")
    blocks = {
        "same": _same,
        "different": _different,
        "unknown": _unknown,
    }[verdict.outcome](verdict)
    for number, block in enumerate(block for block in blocks if block):
        if number:
            yield Line("")
        yield from (replace(line, text=line.text.rstrip()) for line in block)


def _other_side(verdict: Verdict) -> str:
    """What the ranks are compared with."""
    return "what one process computes" if verdict.of_script else "big_batch"


def _same(verdict: Verdict) -> Iterator[list[Line]]:
    assert verdict.comparison is not None
    yield [Line(f"{verdict.subject} is {_other_side(verdict)}: same", Style.GOOD)]
    numbers = _error_text(verdict)
    nearest, worst = verdict.nearest, verdict.comparison.worst
    if nearest is not None:
        numbers += f"  nearest known fault {text_of(nearest.distance, '.1e')}"
    reason = f"limit: {worst.limit.reason}; worst parameter: {worst.name}" if worst else ""
    if nearest is not None:
        reason += f"; nearest fault: {nearest.cause}"
    training = [line for text in training_notes(verdict) for line in paragraph(text, "  ")]
    more = [*random_number_lines(verdict), *without_dropout_lines(verdict), *training]
    more += [*precision_lines(verdict), *fresh_ranks_lines(verdict)]
    more += [*_not_tried_lines(verdict)]
    yield [Line(f"  {numbers}"), *paragraph(reason, "  "), *more]
    yield evidence_lines(verdict)


def _different(verdict: Verdict) -> Iterator[list[Line]]:
    none = "no known cause fits"
    if not verdict.tried_every_cause:
        none = "no cause found, because not all known causes were tried"
    names = " and ".join(verdict.causes) or none
    yield [Line(f"{verdict.subject} is not {_other_side(verdict)}: {names}", Style.BAD)]
    yield [
        *cause_lines(verdict),
        *without_dropout_lines(verdict),
        *random_number_lines(verdict),
        *precision_lines(verdict),
        *fresh_ranks_lines(verdict),
        *_not_tried_lines(verdict),
    ]
    yield expected_and_held_lines(verdict)
    yield structure_lines(verdict)
    yield shares_lines(verdict)
    yield parameters_lines(verdict)
    yield [*other_causes_lines(verdict), *evidence_lines(verdict)]
    yield _output_lines(verdict)


def _unknown(verdict: Verdict) -> Iterator[list[Line]]:
    yield [Line(f"{verdict.subject} against {_other_side(verdict)}: unknown", Style.UNCERTAIN)]
    if verdict.failure is not None:
        yield from failure_blocks(
            verdict.failure, verdict.reason, verdict.second_look, verdict.lane
        )
        yield fresh_ranks_lines(verdict)
        yield _output_lines(verdict)
    else:
        yield [
            *paragraph(f"{verdict.reason[:1].upper()}{verdict.reason[1:]}.", "  "),
            Line("  Nothing was shown, which is not a pass."),
            *precision_lines(verdict),
            *fresh_ranks_lines(verdict),
        ]
        if verdict.comparison is not None and verdict.comparison.parameters:
            yield [Line(f"  {_error_text(verdict)}")]
    yield evidence_lines(verdict)


def _not_tried_lines(verdict: Verdict) -> list[Line]:
    """What the deadline left no time for. The verdict does not depend on it."""
    if not verdict.not_tried or verdict.analysis is None:
        return []
    deadline = verdict.analysis.time.deadline
    return labelled(
        "Explained only in part: " if verdict.outcome == "different" else "Not computed: ",
        f"the deadline of {deadline:g} s left no time for: {', '.join(verdict.not_tried)}. "
        "The verdict itself does not depend on this. A longer deadline gives the rest.",
    )


def _error_text(verdict: Verdict) -> str:
    """``error 3.1e-07  floor 2.4e-07  limit 2.0e-06``."""
    error, floor, limit = verdict.error, verdict.floor, verdict.limit
    if error is None or limit is None:
        return "nothing compared"
    floor_text = "" if floor is None else f"  floor {text_of(floor, '.1e')}"
    return f"error {text_of(error, '.1e')}{floor_text}  limit {text_of(limit, '.1e')}"


def _output_lines(verdict: Verdict) -> list[Line]:
    """The last lines that each rank printed. Ranks that printed the same share one entry."""
    ranks_by_output: dict[str, list[int]] = {}
    for rank, text in sorted(verdict.output.items()):
        if text.strip():
            ranks_by_output.setdefault(text.rstrip(), []).append(rank)
    lines = []
    for text, ranks in ranks_by_output.items():
        last_lines = text.splitlines()[-OUTPUT_LINES:]
        lines.append(Line(f"  Output of {rank_names(ranks)}"))
        lines += [Line(f"    | {line}") for line in last_lines]
    return lines
