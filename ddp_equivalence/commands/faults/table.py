"""Run trials with a planted fault, and write the results as a table with one row for each fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ddp_equivalence.check_equivalence import check
from ddp_equivalence.commands.faults.other_checks import OTHER_CHECKS
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.faults.plant import planted
from ddp_equivalence.faults.trials import FaultTrial
from ddp_equivalence.report.verdict import Verdict

Outcome = Literal["named", "among", "misnamed", "missed", "cannot_show", "never_fired"]
"""The result of planting a fault, in a word.

If the suite found a difference, it accepted the fault as the first cause ("named"), as one of
several causes ("among"), or not at all ("misnamed"). If the suite found no difference, then the
fault cannot show in this trial, and the verdict says so ("cannot_show"); or the fault never did its
damage ("never_fired"); or it did, and the suite did not notice ("missed").
"""


@dataclass(frozen=True)
class FaultResult:
    """The result of one trial with a planted fault.

    ``causes`` are the causes that the diagnosis accepted. ``distance`` is the error of the worst
    parameter, in multiples of its limit. ``noticed_by`` are the other checks that would have
    noticed the fault. ``checked`` says what was checked, so that the trial can be repeated.
    """

    fault_trial: FaultTrial
    outcome: Outcome
    causes: tuple[str, ...]
    distance: float
    seconds: float
    noticed_by: frozenset[str] = field(default_factory=frozenset)
    checked: str = ""

    @property
    def as_expected(self) -> bool:
        """True if the fault was caught and named, or if it cannot show in this trial."""
        return self.outcome in ("named", "among", "cannot_show")


def run_fault_trials(fault_trials: Sequence[FaultTrial]) -> Iterator[FaultResult]:
    """Plant the fault of each trial in turn, and check its case."""
    for fault_trial in fault_trials:
        trial = fault_trial.trial
        with planted(fault_trial.fault.name):
            verdict = check(trial.case, trial.strategy, **trial.options)
        yield result_of(fault_trial, verdict)


def result_of(fault_trial: FaultTrial, verdict: Verdict) -> FaultResult:
    """Say whether the verdict caught the planted fault, and under which name."""
    findings = [finding for finding in verdict.findings if finding.accepted]
    causes = tuple(cause for finding in findings for cause in finding.causes)
    distance = 0.0
    noticed_by: frozenset[str] = frozenset()
    if verdict.outcome == "different":
        if verdict.error is not None and verdict.limit:
            distance = verdict.error / verdict.limit
        analysis = verdict.analysis
        view = None if analysis is None else analysis.view_of_own_draws
        if view is not None:
            noticed_by = frozenset(
                name for name, notices in OTHER_CHECKS.items() if notices(verdict, view)
            )
    return FaultResult(
        fault_trial,
        _outcome(fault_trial, verdict, causes),
        causes,
        distance,
        verdict.seconds,
        noticed_by,
        f"{verdict.subject} on {fault_trial.trial.case}",
    )


def _outcome(fault_trial: FaultTrial, verdict: Verdict, causes: Sequence[str]) -> Outcome:
    name, because = fault_trial.fault.name, verdict.unknown_because
    if verdict.outcome == "different":
        if name not in causes:
            return "misnamed"
        return "named" if name == causes[0] else "among"
    if fault_trial.why_it_cannot_show and because is UnknownBecause.PLANTED_FAULT_CANNOT_SHOW:
        return "cannot_show"
    return "never_fired" if because is UnknownBecause.PLANTED_FAULT_NEVER_FIRED else "missed"


def table_lines(results: Sequence[FaultResult], lines: Mapping[str, bool]) -> Iterator[str]:
    """The table, with one row for each fault, and below it the results that are not as expected.

    ``lines``: for each fault that was planted in a step of one's own too, whether the report
    pointed at the line at which it acts.
    The columns "shows" to "cannot show" count trials. "nearest limits" is the smallest error of a
    caught fault, in multiples of its limit. The last columns count how many of the caught faults
    other checks would have noticed.
    """
    names = list(dict.fromkeys(result.fault_trial.fault.name for result in results))
    width = max(map(len, names), default=0) + 2
    checks = "".join(f"{name:>14}" for name in OTHER_CHECKS)
    yield (
        f"{'':<{width}}{'':>8}{'':>8}{'':>8}{'among':>8}{'cannot':>8}{'line':>10}{'nearest':>10}"
        "   noticed by"
    )
    yield (
        f"{'planted':<{width}}{'shows':>8}{'caught':>8}{'named':>8}{'rivals':>8}{'show':>8}"
        f"{'right':>10}{'limits':>10}{checks}"
    )
    for name in names:
        of_fault = [result for result in results if result.fault_trial.fault.name == name]
        right = {True: "yes", False: "no", None: "-"}[lines.get(name)]
        yield _row(name, of_fault, width, right)
    yield _row("all", list(results), width, f"{sum(lines.values())} of {len(lines)}")
    slowest = max((result.seconds for result in results), default=0.0)
    yield f"slowest from the call to the verdict: {slowest:.1f} s"
    yield from _unexpected(results)
    for name, is_right in lines.items():
        if not is_right:
            yield f"LINE NOT RIGHT: {name} in a step of one's own"


def _row(title: str, results: Sequence[FaultResult], width: int, line_right: str) -> str:
    shown = [result for result in results if result.outcome != "cannot_show"]
    caught = [result for result in shown if result.outcome in ("named", "among", "misnamed")]
    named, among, cannot_show = (
        sum(result.outcome == outcome for result in results)
        for outcome in ("named", "among", "cannot_show")
    )
    nearest = min((result.distance for result in caught), default=0.0)
    noticed = "".join(
        f"{f'{sum(check in result.noticed_by for result in caught)} of {len(caught)}':>14}"
        for check in OTHER_CHECKS
    )
    return (
        f"{title:<{width}}{len(shown):>8}{len(caught):>8}{named:>8}{among:>8}"
        f"{cannot_show:>8}{line_right:>10}{nearest:>10.1e}{noticed}"
    )


def _unexpected(results: Sequence[FaultResult]) -> Iterator[str]:
    for result in results:
        if not result.as_expected:
            outcome = result.outcome.replace("_", " ").upper()
            called = f", called {', '.join(result.causes)}" if result.causes else ""
            yield f"{outcome}: {result.fault_trial.fault.name} in {result.checked}{called}"
