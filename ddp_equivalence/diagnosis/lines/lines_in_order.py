"""Puts the lines that a report points at into the order in which they ran."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine


def in_order(view: View, *lines: PointedLine | None) -> Sequence[PointedLine]:
    """Those of the lines that are known, each once, in the order in which they first ran.

    Of two entries for one line, the one that is the fault counts.
    """
    calls = view.observed.calls
    first: dict[CodeLine, int] = {}
    for number, call in enumerate(calls.of(min(calls.by_rank, default=0))):
        for line in (call.chosen_at, call.users_line, call.line):
            if line is not None:
                first.setdefault(line, number)
    chosen: dict[CodeLine, PointedLine] = {}
    for one in lines:
        if one is not None and (one.line not in chosen or one.is_fault):
            chosen[one.line] = one
    return sorted(chosen.values(), key=lambda one: first.get(one.line, len(first)))
