"""The table that ends every run: what was compared with one big batch, and what was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.report.record import Record

COMPARED = ("same", "different")

CANNOT_SHOW = UnknownBecause.PLANTED_FAULT_CANNOT_SHOW.value


@dataclass(frozen=True)
class NotRun:
    """A case that did not run, and why."""

    what: str
    layout: str
    lane: str
    reason: str


def summary(
    records: Sequence[Record], not_run: Sequence[NotRun], must_run: Sequence[str]
) -> Mapping[str, object]:
    """The counts of a run, as machines read them."""
    planted = [one for one in records if one["planted"]]
    records = _not_planted(records)
    expected_same = [one for one in records if one["expected"] == "same"]
    known = [one for one in records if one["known"]]
    return {
        "compared": len(compared(records)),
        "same": sum(one["outcome"] == "same" for one in expected_same),
        "different": sum(one["outcome"] == "different" for one in expected_same),
        "unknown": sum(one["outcome"] == "unknown" for one in records),
        "known_differences": len(known),
        "known_differences_confirmed": sum(one["confirmed"] for one in known),
        "not_run": len(not_run),
        "planted": len(planted),
        "planted_caught": sum(one["outcome"] == "different" for one in planted),
        "planted_named": sum(one["planted"] in one["causes"] for one in planted),
        "parameters_compared": sum(one["parameters"] * one["ranks"] for one in compared(records)),
        "lanes": dict(Counter(one["backend"] for one in compared(records))),
        "must_run_missing": list(lanes_missing(records, must_run)),
    }


def compared(records: Sequence[Record]) -> Sequence[Record]:
    """Those that were judged; what was broken on purpose is none of them."""
    return [one for one in _not_planted(records) if one["outcome"] in COMPARED]


def _not_planted(records: Sequence[Record]) -> Sequence[Record]:
    return [one for one in records if not one["planted"]]


def lanes_missing(records: Sequence[Record], must_run: Sequence[str]) -> Iterator[str]:
    """The lanes that had to run and on which nothing was compared."""
    ran = {one["backend"] for one in compared(records)}
    return (lane for lane in must_run if lane not in ran)


def lines(
    records: Sequence[Record], not_run: Sequence[NotRun], must_run: Sequence[str] = ()
) -> Iterator[str]:
    """The table, line by line."""
    planted = [one for one in records if one["planted"]]
    records = _not_planted(records)
    layouts = list(dict.fromkeys(one["layout"] for one in records))
    layouts.sort(key=_size)
    names = sorted({one["strategy"] for one in records if one["expected"] == "same"})
    missing = {one.what for one in not_run} - set(names)
    width = max(map(len, [*names, *missing, "differ, as their tests know"]), default=0) + 2
    columns = {layout: max(6, len(layout) + 2) for layout in layouts}
    if layouts and (names or missing):
        yield " " * width + "".join(f"{layout:>{columns[layout]}}" for layout in layouts)
    for name in names:
        rows = [one for one in records if one["strategy"] == name and one["expected"] == "same"]
        counts = Counter(one["layout"] for one in rows if one["outcome"] in COMPARED)
        cells = "".join(f"{counts.get(one) or '–':>{columns[one]}}" for one in layouts)
        yield f"{name:<{width}}{cells}    {_state(rows)}"
    for name in sorted(missing):
        reasons = sorted({one.reason for one in not_run if one.what == name})
        cells = "".join(f"{'–':>{columns[layout]}}" for layout in layouts)
        yield f"{name:<{width}}{cells}    NOT RUN: {'; '.join(reasons)}"
    yield from _known_differences(records, width)
    yield from _planted(planted, width)
    yield from _also_not_run(not_run, missing)
    if records or not planted:
        yield from _totals(records, must_run)


def _size(layout: str) -> tuple[int, int, str]:
    found = parse(layout)
    return found.world_size, found.nodes, layout


def _state(rows: Sequence[Record]) -> str:
    outcomes = Counter(one["outcome"] for one in rows)
    if set(outcomes) == {"same"}:
        return "same"
    names = {"same": "same", "different": "DIFFER", "unknown": "UNKNOWN"}
    return ", ".join(f"{outcomes[one]} {name}" for one, name in names.items() if outcomes[one])


def _known_differences(records: Sequence[Record], width: int) -> Iterator[str]:
    known = [one for one in records if one["known"]]
    judged = [one for one in records if not one["known"] and one["expected"] != "same"]
    differ_too = [one for one in judged if one["outcome"] == "different"]
    if differ_too:
        names = ", ".join(sorted({one["cause"] or "no known cause" for one in differ_too}))
        yield f"{'differ, as their tests know':<{width}}{len(differ_too)} ({names})"
    if len(judged) > len(differ_too):
        yield f"{'unknown, as their tests know':<{width}}{len(judged) - len(differ_too)}"
    if not known:
        return
    differ = sum(one["outcome"] == "different" for one in known)
    named = sum(one["confirmed"] for one in known)
    total = len(known)
    yield (
        f"{'known differences':<{width}}{differ} of {total} differ, "
        f"{named} of {total} under their known name"
    )
    causes = Counter(one["cause"] for one in known if one["outcome"] == "different")
    yield " " * width + ", ".join(f"{name} {count}" for name, count in causes.most_common())


def _planted(planted: Sequence[Record], width: int) -> Iterator[str]:
    """The proof that the rest of the table could have come out otherwise."""
    if not planted:
        return
    shown = [one for one in planted if one["outcome"] != "unknown"]
    caught = [one for one in shown if one["outcome"] == "different"]
    named = sum(one["planted"] in one["causes"] for one in caught)
    rivals = sum(one["planted"] in one["causes"][1:] for one in caught)
    distances = [one["error"] / one["limit"] for one in caught if one["error"] and one["limit"]]
    nearest = f", nearest {min(distances):.0e} limits away" if distances else ""
    faults = len({one["planted"] for one in planted})
    of = f"{faults} {_plural(faults, 'kind')}"
    of += f"; {rivals} beside others that leave the same" if rivals else ""
    yield (
        f"{'planted faults':<{width}}{len(caught)} of {len(shown)} caught, {named} of {len(shown)} "
        f"named ({of}){nearest}"
    )
    hidden = sum(one["unknown_because"] == CANNOT_SHOW for one in planted)
    others = {
        f"{hidden} more cannot show there, which was said": hidden,
        f"{len(planted) - len(shown) - hidden} UNKNOWN": len(planted) - len(shown) - hidden,
        f"{len(shown) - len(caught)} MISSED": len(shown) - len(caught),
    }
    for text, count in others.items():
        if count:
            yield f"{'':<{width}}{text}"


def _also_not_run(not_run: Sequence[NotRun], listed: set[str]) -> Iterator[str]:
    """Cases of strategies that ran elsewhere."""
    reasons = Counter((one.lane, one.reason) for one in not_run if one.what not in listed)
    for (lane, reason), count in reasons.items():
        yield f"NOT RUN: {count} more {_plural(count, 'case')} on {lane}: {reason}"


def _totals(records: Sequence[Record], must_run: Sequence[str]) -> Iterator[str]:
    judged = compared(records)
    lanes = Counter(one["backend"] for one in judged)
    for lane, count in sorted(lanes.items()):
        text = f"lane {lane}: {count} {_plural(count, 'case')} compared"
        reasons = Counter(one["lane_reason"] for one in judged if one["backend"] == lane)
        ((reason, times),) = reasons.most_common(1)
        mostly = "" if times == count else "mostly: "
        yield text + (f" ({mostly}{reason})" if reason else "")
    parameters = sum(one["parameters"] * one["ranks"] for one in judged)
    ranks = sum(one["ranks"] for one in judged)
    if judged:
        yield (
            f"{len(judged)} {_plural(len(judged), 'case')} compared with one big batch: "
            f"{parameters:,} gradients of parameters, on {ranks:,} ranks"
        )
    else:
        yield "NOTHING was compared with one big batch"
    for lane in lanes_missing(records, must_run):
        yield f"--must-run {lane}: FAILED, nothing was compared on this lane"


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
