"""A line of the user's code that a report points at."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_equivalence.measurement.calls import CodeLine


@dataclass(frozen=True)
class PointedLine:
    """``note``: what the line did, as a clause of the report; "" if the line speaks for itself.

    ``is_fault``: the line to change, or, if something is ``missing``, the line after which it
    should stand. ``missing``: what should stand there.
    """

    line: CodeLine
    note: str = ""
    is_fault: bool = False
    missing: str = ""
