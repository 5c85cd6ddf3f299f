"""Collectives that nobody waited for, and gradients that changed after their step had returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.indications import ranks_by_number
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.work import Evidence

CAUSE = "collective_not_waited_for"

SENTENCE = "The step returned before a collective that it had issued was known to be complete."

LOOK_AT = (
    "the call with async_op=True: it returns a handle, and handle.wait() must be called before the "
    "gradient is read"
)

CONSEQUENCES = frozenset(
    (
        *("no_all_reduce", "parameters_reduced_not_gradients", "parameter_not_reduced"),
        *("bucket_not_reduced", "reduced_before_backward_finished"),
    )
)
"""Causes that leave the same numbers as a collective whose result comes too late."""

MOST_NAMES = 3

MOST_LINES = 2


def against_a_race(evidence: Mapping[int, Evidence], comparison: Comparison) -> Unknown | None:
    """Gradients that were right show nothing if they could have been read too early."""
    seen = _seen(evidence, comparison)
    if not seen:
        return None
    return Unknown(
        UnknownBecause.COLLECTIVE_NOT_WAITED_FOR,
        f"the gradients were right this time, but {seen}. Look at {LOOK_AT}",
    )


def with_race(
    findings: Sequence[Finding], evidence: Mapping[int, Evidence], comparison: Comparison
) -> tuple[Finding, ...]:
    """The findings, and a race before them if one was seen.

    If other causes explain the numbers, all are named.
    """
    seen = _seen(evidence, comparison)
    if not seen:
        return tuple(findings)
    best = findings[0] if findings and findings[0].accepted else None
    race = Finding(
        cause=CAUSE,
        sentence=SENTENCE,
        look_at=LOOK_AT,
        accepted=True,
        fits=True,
        because=seen,
        headline="a collective is not waited for",
        fix="call wait() on the handle of this collective before the gradient is read.",
        lines=_lines(evidence, comparison),
        tell_apart="Wait for every handle: this difference then goes away.",
    )
    if best is not None and CONSEQUENCES.isdisjoint(best.causes):
        race = replace(
            race,
            detail=best.detail,
            unexplained=best.unexplained,
            more=(replace(best, more=()), *best.more),
        )
    return race, *(replace(finding, accepted=False) for finding in findings)


def _seen(evidence: Mapping[int, Evidence], comparison: Comparison) -> str:
    """What was seen of a race on the ranks, as a clause; "" if nothing was."""
    return "; and ".join((*_never_waited_for(evidence, comparison), *_changed_later(evidence)))


def _lines(evidence: Mapping[int, Evidence], comparison: Comparison) -> tuple[PointedLine, ...]:
    """The lines that issued collectives which nobody waited for, each once."""
    found: dict[CodeLine, str] = {}
    for one in evidence.values():
        for missed in one.missed_waits:
            path, number, function = missed.place
            if path and missed.elements >= comparison.fewest_exchanged:
                found.setdefault(CodeLine(path, number, function), missed.op)
    return tuple(
        PointedLine(line, f"{op}: the step returned before it was complete", True, "handle.wait()")
        for line, op in list(found.items())[:MOST_LINES]
    )


def _never_waited_for(evidence: Mapping[int, Evidence], comparison: Comparison) -> Iterator[str]:
    """Collectives that are large enough to exchange gradients."""
    fewest = comparison.fewest_exchanged
    ranks_by_collective: dict[str, list[int]] = {}
    for rank, one in evidence.items():
        large = [str(missed) for missed in one.missed_waits if missed.elements >= fewest]
        for collective in dict.fromkeys(large):
            ranks_by_collective.setdefault(collective, []).append(rank)
    if ranks_by_collective:
        ranks = sorted({rank for found in ranks_by_collective.values() for rank in found})
        yield f"{ranks_by_number(ranks)} never waited for {_few(list(ranks_by_collective))}"


def _changed_later(evidence: Mapping[int, Evidence]) -> Iterator[str]:
    ranks = [rank for rank, one in evidence.items() if one.changed_later]
    if ranks:
        names = dict.fromkeys(name for one in evidence.values() for name in one.changed_later)
        yield (
            f"on {ranks_by_number(ranks)} these gradients changed after the step had returned: "
            f"{_few(list(names))}"
        )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
