"""A step with libraries that is not the same is judged again on new ranks: libraries keep state.

What an earlier check has left in a library, in the same processes, may change a verdict. New ranks
have nothing of an earlier check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.report.line import Line, labelled

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict

LABEL = "Fresh ranks: "


def judged_on_fresh_ranks(
    verdict: Verdict, request: Request, judge: Callable[[Request], Verdict]
) -> Verdict:
    """The verdict, or that of new ranks if libraries of an earlier check may have changed it."""
    libraries = libraries_of_earlier_checks(verdict)
    if verdict.outcome == "same" or request.fresh or request.in_process or not libraries:
        return verdict
    if verdict.unknown_because is UnknownBecause.LIMIT_ABOVE_SIGNAL:
        return verdict  # nothing differed, and the limits follow from the reference
    again = judge(replace(request, fresh=True))
    return replace(again, on_used_ranks=verdict.outcome, libraries_kept=libraries)


def libraries_of_earlier_checks(verdict: Verdict) -> tuple[str, ...]:
    """The libraries that earlier checks had imported on the ranks of this one."""
    if verdict.failure is not None:
        return verdict.failure.libraries
    return tuple(sorted({name for one in verdict.evidence.values() for name in one.libraries}))


def fresh_ranks_text(verdict: Verdict) -> str:
    """What came out on ranks that had run earlier checks, beside new ones; "" without both."""
    if verdict.on_used_ranks is None:
        return ""
    kept = ", ".join(verdict.libraries_kept)
    if verdict.on_used_ranks == verdict.outcome:
        return (
            f"{verdict.outcome} on them as well as on ranks that had already run earlier checks, "
            f"where {kept} may have kept state."
        )
    return (
        f"{verdict.outcome} on them, which counts; {verdict.on_used_ranks} on ranks that had "
        f"already run earlier checks, where {kept} may have kept state."
    )


def fresh_ranks_lines(verdict: Verdict) -> list[Line]:
    """The same as lines of a report."""
    text = fresh_ranks_text(verdict)
    return labelled(LABEL, text) if text else []
