"""Ranks that failed, as text: who waited for whom, the root cause, then its consequences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ddp_equivalence.case import settings
from ddp_equivalence.measurement.rerun import Rerun
from ddp_equivalence.ranks.failure import RankEnd, RankFailed
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.report.hints import hint_lines
from ddp_equivalence.report.line import Line, paragraph
from ddp_equivalence.report.wrapping import plural, rank_names

TRACEBACK_LINES = 30
CONSEQUENCE_LINES = 3
MOST_CONSEQUENCES = 7

NOT_COMPARED = "Not compared: {reason}. This says nothing about equivalence."
CHANGED = (
    "The gradients are those of the big batch, but {reason}. In a training run these changes would "
    "last, and the next test would meet them; here they were undone. If they are intended, say so: "
    "allow_changes=True, --ddp-allow-changes, or @pytest.mark.ddp(allow_changes=True)."
)

NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")

MOST_WIDTHS = 5
"""A message of torch is cut after this many times the width of the report."""


def failure_blocks(
    failure: RankFailed, reason: str, rerun: Rerun | None, lane: Lane | None = None
) -> Iterator[list[Line]]:
    """What is known of the failure, in blocks of lines. ``lane``: that of the ranks, if known."""
    changed = bool(failure.ends) and failure.ends[0].kind == "changed"
    head = paragraph((CHANGED if changed else NOT_COMPARED).format(reason=reason), "  ")
    if not failure.ends:
        head += paragraph(str(failure), "  ")
    if failure.waiting:
        head += paragraph(failure.waiting, "  ")
    yield head
    failed = [end for end in failure.ends if end.failed]
    alike = _that_ended_alike(failed)
    for number, (end, *others) in enumerate(alike[: 1 + MOST_CONSEQUENCES]):
        role = "Root cause" if number == 0 else "Also" if changed else "Then"
        yield [*_rank_end_lines(end, role, lane), *_others_lines(end, others)]
    finished = [end.rank for end in failure.ends if not end.failed]
    more = sum(map(len, alike[1 + MOST_CONSEQUENCES :]))
    rest = [Line(f"  Then: {more} more {plural(more, 'rank')}")] if more > 0 else []
    if finished:
        rest += paragraph(f"Finished its work: {rank_names(finished)}", "  ")
    yield rest
    if rerun is not None:
        yield _rerun_lines(rerun)


def _that_ended_alike(ends: Sequence[RankEnd]) -> list[list[RankEnd]]:
    """The ends, with those together that a reader could not tell apart but for their rank."""
    groups: dict[object, list[RankEnd]] = {}
    for end in ends:
        key: object = (end.kind, end.what, end.line, str(end.last))
        if end.kind == "exception":  # the message may have the rank or a number of its data
            key = (NUMBER.sub("0", end.what), end.line)
        groups.setdefault(key, []).append(end)
    return [sorted(group, key=lambda end: end.rank) for group in groups.values()]


def _others_lines(end: RankEnd, others: Sequence[RankEnd]) -> list[Line]:
    """The other ranks that ended like this one."""
    if not others:
        return []
    names = rank_names([other.rank for other in others])
    if end.kind != "exception":
        return paragraph(f"The same is true of {names}.", "  ")
    alike = all(other.what == end.what for other in others)
    return paragraph(
        f"R{names[1:]} raised the same{'' if alike else ', with other numbers'}.", "  "
    )


def _rank_end_lines(end: RankEnd, role: str, lane: Lane | None) -> list[Line]:
    where = f"rank {end.rank} (node {end.node}, local rank {end.local_rank})"
    first, *more = end.what.splitlines() or [""]
    lines = paragraph(f"{role}: {where} {first}", "  ")
    if end.line:
        lines.append(Line(f"    at {end.line}"))
    if end.last is not None:
        called = f", called at {end.last.line}" if end.last.line not in ("", end.line) else ""
        lines.append(Line(f"    last collective: {end.last}{called}"))
    is_cause = role == "Root cause"
    lines += hint_lines(end.what, lane) if is_cause else []
    most = TRACEBACK_LINES if is_cause else CONSEQUENCE_LINES
    detail = end.detail.rstrip().splitlines()
    shown: list[str] = []
    if end.kind == "exception" and (detail or more):
        shown = (detail or more)[-most:]
    elif is_cause:
        shown = detail[:most]
    return [*lines, *(Line(f"    | {line}") for line in shown)]


def _rerun_lines(rerun: Rerun) -> list[Line]:
    title = f"Rerun on fresh ranks, TORCH_DISTRIBUTED_DEBUG=DETAIL, {rerun.seconds:.1f} s:"
    if rerun.failure is None:
        return paragraph(f"{title} the step did not fail again; all ranks finished.", "  ")
    outcome = "the step failed again."
    if not rerun.ranks_began:
        outcome = "the fresh ranks could not be started."
    elif rerun.cut_short:
        outcome = "the step was not done by the rerun's deadline either."
    lines = paragraph(f"{title} {outcome}", "  ")
    lines += paragraph(_first_line(str(rerun.failure)), "    ")
    if rerun.failure.waiting:
        lines += paragraph(rerun.failure.waiting, "    ")
    return lines


_TENSOR_OPTIONS = re.compile(r", TensorDeviceTypes=TensorOptions\(.*?\(nullopt\)\)")
"""Torch adds this to each collective of a mismatch; it says nothing about the mismatch."""


def _first_line(message: str) -> str:
    first = _TENSOR_OPTIONS.sub("", message.splitlines()[0] if message else "")
    most = MOST_WIDTHS * settings.current().width
    return first if len(first) <= most else f"{first[:most]}..."
