"""What the random numbers of a step have to do with its difference."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddp_equivalence.report.line import Line, labelled

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict


def random_number_lines(verdict: Verdict) -> list[Line]:
    """For the whole report; nothing if nothing was drawn, or if a cause was named without it."""
    text = random_number_text(verdict)
    return labelled("Random numbers: ", text[:1].lower() + text[1:]) if text else []


def random_number_text(verdict: Verdict) -> str:
    """Which rank was seen to draw, where, and what was seen of the numbers; "" without any."""
    drew = _first_draw(verdict)
    if verdict.analysis is None or not drew:
        return ""
    drawn = verdict.analysis.drawn
    if drawn is None:
        if verdict.causes:
            return ""
        return f"The big batch could not be given the random numbers of the ranks. {drew}."
    if not drawn.nothing_else_differs:
        return f"With the ranks' random numbers, the big batch still differs. {drew}."
    held = "held then" if verdict.repeated is False else "hold"
    return f"With the ranks' random numbers, the big batch is what they {held}. {drew}."


def _first_draw(verdict: Verdict) -> str:
    """``Rank 0 drew at model.py:12``: of the first draw with a line that is known."""
    again = " when it ran again" if verdict.repeated is False else ""
    for rank, seen in sorted(verdict.observed.items()):
        for draw in seen.draws or ():
            if draw.line is not None:
                place = f"{os.path.basename(draw.line.file)}:{draw.line.number}"
                return f"Rank {rank} drew at {place}{again}"
    return ""
