"""The results of a search through random trials of the suite, as text and for machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ddp_equivalence.commands.explore.suite_search import JudgedTrial, SuiteSearch


def report_lines(search: SuiteSearch) -> Iterator[str]:
    """The tables, the report on the smallest case of each mistake, and a line that counts all."""
    right = [each for each in search.judged if each.cause is None]
    wrong = [each for each in search.judged if each.cause is not None]
    if right:
        yield from _right_cases_table(right)
    if wrong:
        yield from _known_differences_table(wrong)
    for mistake, report in search.smallest_mistakes:
        yield ""
        kind = "False alarm" if mistake.cause is None else f"Missed: {mistake.cause}"
        yield f"{kind}, shrunk to the smallest case:"
        yield report.rstrip()
    yield ""
    if search.interrupted:
        yield "INTERRUPTED: only the cases above were tried"
    yield (
        f"{len(right)} random right cases: {len(search.false_alarms)} false alarms; "
        f"{len(wrong)} random known differences: {len(search.misses)} missed or misnamed; "
        f"seed {search.seed}, {search.seconds:.0f} s"
    )


def as_json(search: SuiteSearch) -> dict[str, Any]:
    """The same results as values that can be written as JSON."""
    return {
        "seed": search.seed,
        "interrupted": search.interrupted,
        "seconds": round(search.seconds, 1),
        "right": sum(each.cause is None for each in search.judged),
        "false_alarms": len(search.false_alarms),
        "known_differences": sum(each.cause is not None for each in search.judged),
        "misses": len(search.misses),
        "smallest": [
            {"repeat": mistake.repeat, "report": report}
            for mistake, report in search.smallest_mistakes
        ],
        "cases": [
            {
                "id": str(each.trial),
                "strategy": each.trial.strategy,
                "expected": each.cause or "same",
                "outcome": each.outcome,
                "cause": each.named_cause,
                "reason": each.reason,
                "error_over_limit": each.margin,
                "right": each.right,
                "repeat": each.repeat,
            }
            for each in search.judged
        ],
    }


def _right_cases_table(judged: Sequence[JudgedTrial]) -> Iterator[str]:
    rows: dict[tuple[str, str], list[JudgedTrial]] = {}
    for each in judged:
        rows.setdefault((each.trial.strategy, each.trial.case.dtype_name), []).append(each)
    width = max(len(strategy) for strategy, _ in rows) + 2
    yield f"{'random right cases':<{width + 10}}{'cases':>7}{'same':>7}{'false alarms':>14}" + (
        f"{'unknown':>9}{'worst error / limit':>21}"
    )
    for (strategy, dtype), row in sorted(rows.items()):
        yield f"{strategy:<{width}}{dtype:<10}{_cells(row)}"
    yield f"{'all':<{width + 10}}{_cells(judged)}"
    yield from _reasons_for_unknown(judged)


def _cells(row: Sequence[JudgedTrial]) -> str:
    outcomes = Counter(each.outcome for each in row)
    margins = [each.margin for each in row if each.margin is not None and each.outcome == "same"]
    worst = f"{max(margins):.2f}" if margins else "–"
    counts = (len(row), outcomes["same"], outcomes["different"], outcomes["unknown"])
    cells = zip(counts, (7, 7, 14, 9), strict=True)
    return "".join(f"{count:>{width}}" for count, width in cells) + f"{worst:>21}"


def _known_differences_table(judged: Sequence[JudgedTrial]) -> Iterator[str]:
    yield ""
    rows: dict[str, list[JudgedTrial]] = {}
    for each in judged:
        rows.setdefault(str(each.cause), []).append(each)
    width = max(map(len, [*rows, "random known differences"])) + 2
    head = f"{'cases':>7}{'caught':>9}{'named':>9}{'unknown':>9}"
    yield f"{'random known differences':<{width}}{head}"
    for cause, row in [*sorted(rows.items()), ("all", list(judged))]:
        caught = [each for each in row if each.outcome == "different"]
        named = sum(each.named_cause == each.cause for each in caught)
        unknown = sum(each.outcome == "unknown" for each in row)
        yield f"{cause:<{width}}{len(row):>7}{len(caught):>9}{named:>9}{unknown:>9}"
    yield from _reasons_for_unknown(judged)


def _reasons_for_unknown(judged: Sequence[JudgedTrial]) -> Iterator[str]:
    """Each reason why cases could not be judged, with a line that repeats one of them."""
    by_reason: dict[str, list[JudgedTrial]] = {}
    for each in judged:
        if each.outcome == "unknown":
            by_reason.setdefault(each.reason, []).append(each)
    for reason, unknown in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        yield f"unknown, {len(unknown)}: {reason}"
        yield f"  {unknown[0].repeat}"
