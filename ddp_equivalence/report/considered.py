"""What else was considered, and why it is not believed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddp_equivalence.report.wrapping import wrapped

if TYPE_CHECKING:
    from ddp_equivalence.diagnosis.finding import Finding
    from ddp_equivalence.report.verdict import Verdict

MOST_RULED_OUT = 6


def considered_lines(verdict: Verdict) -> list[str]:
    """Rivals, what has the same numbers, what is ruled out, and what could not show."""
    accepted = [one for one in verdict.findings if one.accepted]
    alike = [one for one in verdict.findings if one.fits and not one.accepted]
    refused = [one for one in verdict.findings if not one.fits and one.would_show]
    hidden = [one.cause for one in verdict.findings if not one.fits and not one.would_show]
    lines = []
    if len(accepted) > 1:
        rivals = ", ".join(" and ".join(one.causes) for one in accepted)
        lines += wrapped(f"Cannot be told apart on this case: {rivals}", "  ")
        for one in accepted:
            if one.tell_apart:
                lines += wrapped(f"{one.cause}: {one.tell_apart}", "    ")
    if alike:
        told = "; ".join(
            f"{one.cause} ({one.because or 'nothing was seen of it'})" for one in alike
        )
        lines += wrapped(f"Same numbers, but: {told}", "  ")
    if refused:
        what = "Ruled out" if accepted else "Nearest, but none of them"
        lines += wrapped(f"{what}: {', '.join(_ruled_out(refused))}", "  ")
    if hidden:
        lines += wrapped(f"Would not show on this case: {', '.join(hidden)}", "  ")
    return lines


def _ruled_out(refused: list[Finding]) -> Iterator[str]:
    """The nearest few, those that predict the same as one."""
    by_rest: dict[str, list[str]] = {}
    for one in refused:
        rest = one.unexplained
        known = rest is not None and rest != float("inf")
        by_rest.setdefault(f"{rest:.2g} unexplained" if known else "", []).append(one.cause)
    for number, (rest_text, causes) in enumerate(by_rest.items()):
        if number == MOST_RULED_OUT:
            yield f"and {sum(map(len, list(by_rest.values())[number:]))} more"
            return
        names = causes[0] if len(causes) == 1 else f"{causes[0]} and {len(causes) - 1} like it"
        yield f"{names} ({rest_text})" if rest_text else names
