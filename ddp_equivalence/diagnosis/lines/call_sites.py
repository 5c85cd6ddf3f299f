"""The lines that call a helper function, where what is wrong is how often or where it is called."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.lines.meeting_lines import meeting_lines
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.lines.source_tree import place_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind

OF_PLACE = frozenset(
    {"reduced_more_than_once", "only_last_micro_batch", "clipped_per_micro_batch"}
    | {"accumulation_boundary_off_by_one", "averaged_twice"}
)
"""The causes in which a right line stands, or is called from, at the wrong place."""

ACTING = (Kind.COLLECTIVE, Kind.CHANGE, Kind.CLIP, Kind.ZERO_GRAD)


def with_call_sites(view: View, lines: Sequence[PointedLine]) -> list[PointedLine]:
    """The lines, and before the first faulty one that stands in a helper, the call of the helper.

    Only for what was done between backward passes, or more than once to the same gradient, and for
    lines that changed gradients: of these the call is no fault by itself.
    """
    known = {one.line for one in lines}
    for number, one in enumerate(lines):
        if one.is_fault and not one.missing:
            sites = [site for site in _sites(view, one.line) if site.line not in known]
            return [*lines[:number], *sites[:1], *lines[number:]]
    return list(lines)


def _sites(view: View, line: CodeLine) -> list[PointedLine]:
    """The lines, beside a backward pass in the same function, that led to this one."""
    rank = min(view.observed.calls.by_rank, default=0)
    calls = view.observed.calls.of(rank)
    made = [one for one in calls if one.kind in ACTING and (one.users_line or one.line) == line]
    made = [one for one in made if not one.in_backward]
    backwards = [one for one in calls if one.kind is Kind.BACKWARD]
    is_repeated = _is_repeated(made, len(backwards))
    if not backwards or not (is_repeated or any(one.change is not None for one in made)):
        return []
    found: dict[CodeLine, int] = {}
    for call in made:
        site = _site(call, backwards)
        if site is not None and site != line:
            found[site] = found.get(site, 0) + 1
    is_late = all(one.backwards >= len(backwards) for one in made)
    if is_repeated and is_late and len(found) == 1 and _times(view, rank, next(iter(found))) == 1:
        return []  # what was done twice was done in one call of the helper
    return [PointedLine(site, _note(view, rank, site, line), is_repeated) for site in found]


def _is_repeated(made: Sequence[Call], backwards: int) -> bool:
    """True if something was done before the last backward pass, or twice to one gradient."""
    if any(0 < one.backwards < backwards for one in made):
        return True
    names: list[str] = []
    for call in made:
        about = call.collective or call.change or call
        names += about.names
    return len(names) > len(set(names))


def _site(call: Call, backwards: Sequence[Call]) -> CodeLine | None:
    """The line of the innermost function that made both a backward pass and this call."""
    before = [one for one in backwards if one.backwards < call.backwards]
    for backward in (*reversed(before), *backwards):
        met = meeting_lines(backward, call)
        if met is not None:
            return met[1]
    return None


def _times(view: View, rank: int, site: CodeLine) -> int | None:
    """How often the line ran; None if that is not certain."""
    place = place_of(site.file, site.number)
    return run_lines(view, rank).exact_count(place, place.statement) if place is not None else None


def _note(view: View, rank: int, site: CodeLine, line: CodeLine) -> str:
    """How often the site ran, if that is certain, and where it leads."""
    times = _times(view, rank, site)
    where = f"line {line.number}" if line.file == site.file else "the line below"
    if not times:
        return f"calls what leads to {where}"
    often = "once" if times == 1 else f"{times} times"
    return f"runs {often}, and leads to {where}"
