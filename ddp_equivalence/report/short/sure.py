"""How sure the cause is, and by how much the result is off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.line import Line
from ddp_equivalence.report.short.text import shortened, wrapped_lines
from ddp_equivalence.report.wrapping import plural

if TYPE_CHECKING:
    from ddp_equivalence.diagnosis.finding import Finding
    from ddp_equivalence.report.verdict import Verdict

LONGEST_NAME = 45
SHORTEST_NAME = 16
MOST_OTHERS = 2

ORDINARY_LANES = ("gloo", "gloo_fallback")
"""On any other lane the report says which it was."""

ALL = 1e-3
"""A cause that leaves less than this unexplained, which rounding may do, explains everything."""


def sure_lines(verdict: Verdict, width: int, most: int) -> list[Line]:
    """How sure, and the counts: on one line if they fit, else at most so many lines for each."""
    counts = _counts(verdict)
    texts = [text for text in (_how_sure(verdict), counts) if text]
    if not texts:
        return []
    together = "  " + " ".join(texts)
    if len(together) <= width:
        return [Line(together)]
    too_long = len(counts) + 2 - width
    if most == 1 and too_long > 0:  # dots may stand in a name, and not for a number
        texts[-1] = _counts(verdict, too_long)
    return [line for text in texts for line in wrapped_lines(text, width, most)]


def _how_sure(verdict: Verdict) -> str:
    accepted = [finding for finding in verdict.findings if finding.accepted]
    if not accepted:
        return ""
    best, *others = accepted
    if others:
        return _not_told_apart(best, others)
    if best.besides is not None:
        factor = text_of(best.besides, ".4g")
        return f"Explains all but a factor of {factor}, which every gradient has besides."
    if best.unexplained is None and verdict.comparison is not None and verdict.comparison.same:
        return "All gradients of this step are right."
    if best.unexplained is None:
        seen = "Seen to happen; its effect on the numbers cannot be computed."
        return seen if _was_seen(best) else ""
    if not best.fits:
        return "Seen happening; the numbers have other reasons too."
    if not _was_seen(best):
        taken = " (one was taken from the result itself)" if best.fitted else ""
        return f"Fits the numbers{taken}; not seen happening."
    if best.unexplained > ALL:
        return f"Explains all but {text_of(100 * best.unexplained, '.2g')} % of the norm."
    return f"Explains {_elements(verdict)}."


def _not_told_apart(best: Finding, others: list[Finding]) -> str:
    names = [" and ".join(finding.causes) for finding in others]
    shown = " or ".join(names[:MOST_OTHERS])
    more = f" (or {len(names) - MOST_OTHERS} more)" if len(names) > MOST_OTHERS else ""
    advice = next((one.tell_apart for one in (best, *others) if one.tell_apart), "")
    end = f"; {advice[:1].lower()}{advice[1:]}" if advice else "."
    return f"Fits, but {shown}{more} would leave the same numbers{end}"


def _was_seen(finding: Finding) -> bool:
    if finding.is_guess:
        return False
    return any(one.lines or one.because for one in (finding, *finding.more))


def _elements(verdict: Verdict) -> str:
    view = verdict.view
    whole = view is None or view.parameters.sample.is_whole
    return "every element" if whole else "every element that was looked at"


def _counts(verdict: Verdict, left_out: int = 0) -> str:
    """How many parameters differ, and the worst. ``left_out``: so many characters of its name."""
    comparison = verdict.comparison
    assert comparison is not None
    differing = comparison.differing
    if not differing:
        return ""
    worst, count = differing[0], len(comparison.parameters)
    error = worst.worst
    text = (
        f"{len(differing)} of {count} {plural(count, 'parameter')} "
        f"{plural(len(differing), 'differs', 'differ')}"
    )
    longest = max(min(len(worst.name), LONGEST_NAME) - left_out, SHORTEST_NAME)
    text += f"{', most' if len(differing) > 1 else ':'} {shortened(worst.name, longest)}"
    if error.alone or error.error <= worst.limit.relative:
        off, limit = text_of(error.element, ".2g"), text_of(worst.limit.element, ".2g")
        place = f"element {list(error.place)} on rank {error.rank}"
        return f"{text}, {place}: error {off}, limit {limit}{_lane(verdict)}."
    separator = ":" if len(differing) > 1 else ","
    off, limit = text_of(error.error, ".2g"), text_of(worst.limit.relative, ".2g")
    return f"{text}{separator} error {off}, limit {limit}{_lane(verdict)}."


def _lane(verdict: Verdict) -> str:
    """Where this was measured. It takes no line of its own, which lines of code would lack."""
    name = verdict.lane.name
    return "" if name in ORDINARY_LANES else f", lane {name}"
