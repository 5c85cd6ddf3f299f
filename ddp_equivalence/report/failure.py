"""Ranks that failed, as text: who waited for whom, the root cause, then its consequences."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_equivalence.case import settings
from ddp_equivalence.measurement.rerun import Rerun
from ddp_equivalence.ranks.failure import RankEnd, RankFailed
from ddp_equivalence.report.wrapping import plural, wrapped

TRACEBACK_LINES = 30
CONSEQUENCE_LINES = 3
MOST_CONSEQUENCES = 7

NOT_COMPARED = "Not compared: {reason}. This says nothing about equivalence."
CHANGED = (
    "The gradients are those of the big batch, but {reason}: in a training run, or in the next "
    "test, that would last. Here it was undone. If it is meant, say so: allow_changes=True, "
    "--ddp-allow-changes, or @pytest.mark.ddp(allow_changes=True)."
)


def failure_blocks(
    failure: RankFailed, reason: str, second_look: Rerun | None
) -> Iterator[list[str]]:
    """What is known of the failure, in blocks of lines."""
    changed = bool(failure.ends) and failure.ends[0].kind == "changed"
    head = wrapped((CHANGED if changed else NOT_COMPARED).format(reason=reason), "  ")
    if not failure.ends:
        head += wrapped(str(failure), "  ")
    yield [*head, *(wrapped(failure.waiting, "  ") if failure.waiting else [])]
    failed = [end for end in failure.ends if end.failed]
    for number, end in enumerate(failed[: 1 + MOST_CONSEQUENCES]):
        yield _rank_end(end, "Root cause" if number == 0 else "Also" if changed else "Then")
    well = [str(end.rank) for end in failure.ends if not end.failed]
    more = len(failed) - 1 - MOST_CONSEQUENCES
    rest = [f"  Then: {more} more {plural(more, 'rank')}"] if more > 0 else []
    if well:
        rest += wrapped(f"Finished its work: {plural(len(well), 'rank')} {', '.join(well)}", "  ")
    yield rest
    if second_look is not None:
        yield _second_look(second_look)


def _rank_end(end: RankEnd, role: str) -> list[str]:
    where = f"rank {end.rank} (node {end.node}, local rank {end.local_rank})"
    first, *more = end.what.splitlines() or [""]
    lines = wrapped(f"{role}: {where} {first}", "  ")
    if end.line:
        lines.append(f"    at {end.line}")
    if end.last is not None:
        called = f", called at {end.last.line}" if end.last.line not in ("", end.line) else ""
        lines.append(f"    last collective: {end.last}{called}")
    is_cause = role == "Root cause"
    shown = TRACEBACK_LINES if is_cause else CONSEQUENCE_LINES
    detail = end.detail.rstrip().splitlines()
    if end.kind == "exception" and (detail or more):
        lines += [f"    | {line}" for line in (detail or more)[-shown:]]
    elif is_cause and detail:
        lines += [f"    | {line}" for line in detail[:shown]]
    return lines


def _second_look(look: Rerun) -> list[str]:
    how = f"Second look (fresh ranks, TORCH_DISTRIBUTED_DEBUG=DETAIL, {look.seconds:.1f} s):"
    if look.failure is None:
        return wrapped(f"{how} it did not fail again; all ranks finished.", "  ")
    found = "it failed again."
    if not look.ranks_began:
        found = "its ranks could not be started."
    elif look.cut_short:
        found = "it was not done by then either."
    lines = wrapped(f"{how} {found}", "  ")
    lines += wrapped(_clipped(str(look.failure)), "    ")
    if look.failure.waiting:
        lines += wrapped(look.failure.waiting, "    ")
    return lines


_OPTIONS = re.compile(r", TensorDeviceTypes=TensorOptions\(.*?\(nullopt\)\)")
"""What torch adds to each collective of a mismatch, and nobody needs."""


def _clipped(text: str) -> str:
    first = _OPTIONS.sub("", text.splitlines()[0] if text else "")
    return (
        first
        if len(first) <= 5 * settings.current().width
        else f"{first[: 5 * settings.current().width]}…"
    )
