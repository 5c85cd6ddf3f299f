"""Where some ranks took another way through the user's code than all others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ddp_equivalence.diagnosis.indications import ranks_by_number
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine


def where_they_part(view: View, ranks: Sequence[int]) -> PointedLine | None:
    """The first line that only these ranks ran, or the last one before they left the others' way.

    None if their lines do not tell them from all others.
    """
    others = [rank for rank in view.observed.lines_run if rank not in ranks]
    if not others or any(rank not in view.observed.lines_run for rank in ranks):
        return None
    alone = _run_by_all(view, ranks) - _run_by_any(view, others)
    missed = _run_by_all(view, others) - _run_by_any(view, ranks)
    who = ranks_by_number(ranks)
    for line in view.observed.lines_run[ranks[0]]:
        if line in alone:
            return PointedLine(line, f"only {who} came here", is_fault=True)
    known = _run_by_all(view, ranks)
    way = view.observed.lines_run[others[0]]
    for before, line in pairwise(way):
        if line in missed and before in known:
            return PointedLine(before, f"{who} did not go on from here", is_fault=True)
    return None


def _run_by_all(view: View, ranks: Sequence[int]) -> set[CodeLine]:
    ran = [set(view.observed.lines_run[rank]) for rank in ranks]
    return set.intersection(*ran)


def _run_by_any(view: View, ranks: Sequence[int]) -> set[CodeLine]:
    return set[CodeLine]().union(*(view.observed.lines_run[rank] for rank in ranks))
