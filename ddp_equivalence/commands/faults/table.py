"""Plant every fault, see whether it is caught and named, and print it as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ddp_equivalence.check_equivalence import check
from ddp_equivalence.commands.faults.other_checks import OTHER_CHECKS
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.faults.plant import planted
from ddp_equivalence.faults.trials import FaultTrial
from ddp_equivalence.report.verdict import Verdict


@dataclass(frozen=True)
class Planting:
    """What came of one planted fault.

    ``outcome``: "named" (first), "among" (named with others that cannot be told apart from it),
    "misnamed", "missed", "hidden" (cannot show there, and the suite says so) or "idle" (it never
    fired). ``named``: what it was called. ``distance``: how many limits the worst parameter is off.
    ``noticed_by``: other checks that would have seen it.
    """

    what: FaultTrial
    outcome: str
    named: tuple[str, ...]
    distance: float
    seconds: float
    noticed_by: frozenset[str] = field(default_factory=frozenset)
    repeat: str = ""

    @property
    def good(self) -> bool:
        return self.outcome in ("named", "among", "hidden")


def plant_all(
    trials: Sequence[FaultTrial], progress: Callable[[Planting], None] = lambda one: None
) -> Iterator[Planting]:
    """Plant one after the other; ``progress`` hears of each."""
    for one in trials:
        with planted(one.fault.name):
            verdict = check(one.trial.case, one.trial.strategy, **one.trial.options)
        found = judged(one, verdict)
        progress(found)
        yield found


def judged(what: FaultTrial, verdict: Verdict) -> Planting:
    """Was it caught, and under which name?"""
    accepted = [name for one in verdict.findings if one.accepted for name in one.causes]
    first, *_ = *accepted, ""
    because = verdict.unknown_because
    distance = 0.0
    noticed: frozenset[str] = frozenset()
    if verdict.outcome == "different":
        outcome = "misnamed"
        if first == what.fault.name:
            outcome = "named"
        elif what.fault.name in accepted:
            outcome = "among"
        if verdict.error is not None and verdict.limit:
            distance = verdict.error / verdict.limit
        view = verdict.view
        if view is not None:
            noticed = frozenset(
                name for name, noticed in OTHER_CHECKS.items() if noticed(verdict, view)
            )
    elif what.hidden and because is UnknownBecause.PLANTED_FAULT_CANNOT_SHOW:
        outcome = "hidden"
    else:
        never_fired = because is UnknownBecause.PLANTED_FAULT_NEVER_FIRED
        outcome = "idle" if never_fired else "missed"
    return Planting(
        what,
        outcome,
        tuple(accepted),
        distance,
        verdict.seconds,
        noticed,
        f"{verdict.subject} on {what.trial.case}",
    )


def lines(found: Sequence[Planting]) -> Iterator[str]:
    """The table: a row a fault, and what other checks would have seen of it."""
    names = list(dict.fromkeys(one.what.fault.name for one in found))
    width = max(map(len, names), default=0) + 2
    checks = "".join(f"{name:>14}" for name in OTHER_CHECKS)
    yield f"{'':<{width}}{'':>8}{'':>8}{'':>8}{'among':>8}{'cannot':>8}{'nearest':>10}   noticed by"
    yield (
        f"{'planted':<{width}}{'shows':>8}{'caught':>8}{'named':>8}{'rivals':>8}{'show':>8}"
        f"{'limits':>10}{checks}"
    )
    for name in names:
        yield _row(name, [one for one in found if one.what.fault.name == name], width)
    yield _row("all", list(found), width)
    slowest = max((one.seconds for one in found), default=0.0)
    yield f"slowest from the call to the verdict: {slowest:.1f} s"
    yield from _misses(found)


def _row(name: str, rows: Sequence[Planting], width: int) -> str:
    shown = [one for one in rows if one.outcome != "hidden"]
    caught = [one for one in shown if one.outcome in ("named", "among", "misnamed")]
    counts = {
        outcome: sum(one.outcome == outcome for one in rows)
        for outcome in ("named", "among", "hidden")
    }
    nearest = min((one.distance for one in caught), default=0.0)
    noticed = "".join(
        f"{f'{sum(check in one.noticed_by for one in caught)} of {len(caught)}':>14}"
        for check in OTHER_CHECKS
    )
    return (
        f"{name:<{width}}{len(shown):>8}{len(caught):>8}{counts['named']:>8}{counts['among']:>8}"
        f"{counts['hidden']:>8}{nearest:>10.1e}{noticed}"
    )


def _misses(found: Sequence[Planting]) -> Iterator[str]:
    for one in found:
        if not one.good:
            named = f", called {', '.join(one.named)}" if one.named else ""
            yield f"{one.outcome.upper()}: {one.what.fault.name} in {one.repeat}{named}"
