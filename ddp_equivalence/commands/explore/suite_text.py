"""What a search through random trials has found, as text and for machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ddp_equivalence.commands.explore.suite_search import Tally, Tried


def lines(tally: Tally) -> Iterator[str]:
    """The table, the smallest case of each mistake with its report, and a last line for both."""
    right = [one for one in tally.tried if one.cause is None]
    wrong = [one for one in tally.tried if one.cause is not None]
    if right:
        yield from _right(right)
    if wrong:
        yield from _wrong(wrong)
    for mistake, report in tally.wrong:
        yield ""
        what = "False alarm" if mistake.cause is None else f"Missed: {mistake.cause}"
        yield f"{what}, shrunk to the smallest case:"
        yield report.rstrip()
    yield ""
    if tally.interrupted:
        yield "INTERRUPTED: what is above had run until then"
    yield (
        f"{len(right)} random right cases: {len(tally.false_alarms)} false alarms; "
        f"{len(wrong)} random known differences: {len(tally.misses)} missed or misnamed; "
        f"seed {tally.seed}, {tally.seconds:.0f} s"
    )


def record(tally: Tally) -> dict[str, Any]:
    """The same for machines."""
    return {
        "seed": tally.seed,
        "interrupted": tally.interrupted,
        "seconds": round(tally.seconds, 1),
        "right": sum(one.cause is None for one in tally.tried),
        "false_alarms": len(tally.false_alarms),
        "known_differences": sum(one.cause is not None for one in tally.tried),
        "misses": len(tally.misses),
        "smallest": [{"repeat": one.repeat, "report": report} for one, report in tally.wrong],
        "cases": [
            {
                "id": str(one.trial),
                "strategy": one.trial.strategy,
                "expected": one.cause or "same",
                "outcome": one.outcome,
                "cause": one.named,
                "reason": one.reason,
                "error_over_limit": one.margin,
                "right": one.right,
                "repeat": one.repeat,
            }
            for one in tally.tried
        ],
    }


def _right(tried: Sequence[Tried]) -> Iterator[str]:
    rows: dict[tuple[str, str], list[Tried]] = {}
    for one in tried:
        rows.setdefault((one.trial.strategy, one.trial.case.dtype_name), []).append(one)
    width = max(len(strategy) for strategy, _ in rows) + 2
    yield f"{'random right cases':<{width + 10}}{'cases':>7}{'same':>7}{'false alarms':>14}" + (
        f"{'unknown':>9}{'worst error / limit':>21}"
    )
    for (strategy, dtype), row in sorted(rows.items()):
        yield f"{strategy:<{width}}{dtype:<10}{_cells(row)}"
    yield f"{'all':<{width + 10}}{_cells(tried)}"
    yield from _unknown(tried)


def _cells(row: Sequence[Tried]) -> str:
    outcomes = Counter(one.outcome for one in row)
    margins = [one.margin for one in row if one.margin is not None and one.outcome == "same"]
    worst = f"{max(margins):.2f}" if margins else "–"
    counts = (len(row), outcomes["same"], outcomes["different"], outcomes["unknown"])
    cells = zip(counts, (7, 7, 14, 9), strict=True)
    return "".join(f"{count:>{width}}" for count, width in cells) + f"{worst:>21}"


def _wrong(tried: Sequence[Tried]) -> Iterator[str]:
    yield ""
    rows: dict[str, list[Tried]] = {}
    for one in tried:
        rows.setdefault(str(one.cause), []).append(one)
    width = max(map(len, [*rows, "random known differences"])) + 2
    head = f"{'cases':>7}{'caught':>9}{'named':>9}{'unknown':>9}"
    yield f"{'random known differences':<{width}}{head}"
    for cause, row in [*sorted(rows.items()), ("all", list(tried))]:
        caught = [one for one in row if one.outcome == "different"]
        named = sum(one.named == one.cause for one in caught)
        unknown = sum(one.outcome == "unknown" for one in row)
        yield f"{cause:<{width}}{len(row):>7}{len(caught):>9}{named:>9}{unknown:>9}"
    yield from _unknown(tried)


def _unknown(tried: Sequence[Tried]) -> Iterator[str]:
    """Why some could not be judged, with a line that repeats one of each."""
    reasons: dict[str, list[Tried]] = {}
    for one in tried:
        if one.outcome == "unknown":
            reasons.setdefault(one.reason, []).append(one)
    for reason, of_reason in sorted(reasons.items(), key=lambda item: -len(item[1])):
        yield f"unknown, {len(of_reason)}: {reason}"
        yield f"  {of_reason[0].repeat}"
