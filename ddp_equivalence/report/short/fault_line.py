"""The one line of code that a verdict is about."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.report.short.lines_of_code import pointed_lines

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict

PLACE = re.compile(r"^(?P<file>.+?):(?P<number>\d+): ")
"""How the end of a rank names a line."""


def line_to_look_at(verdict: Verdict) -> CodeLine | None:
    """The line to change, or where a rank failed, or where the step is defined; None if unknown."""
    if verdict.outcome == "different":
        pointed_at = pointed_lines(verdict)
        faults = [one.line for one in pointed_at if one.is_fault]
        if faults:
            return faults[-1]
    if verdict.failure is not None and verdict.failure.ends:
        place = PLACE.match(verdict.failure.ends[0].line)
        if place is not None:
            return CodeLine(place["file"], int(place["number"]))
    return verdict.defined_at
