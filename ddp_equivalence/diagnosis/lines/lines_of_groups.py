"""The lines that computed which ranks a process group is made of."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.lines.origins import Link, chosen, links_of
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.lines.source_tree import called_name, inside, place_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.reduction_groups import groups_text
from ddp_equivalence.diagnosis.step_calls import StepCalls, reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind

GIVEN = {
    "new_group": ("ranks", 0),
    "new_subgroups": ("group_size", 0),
    "new_subgroups_by_enumeration": ("ranks_per_subgroup_list", 0),
    "init_device_mesh": ("mesh_shape", 1),
    "DeviceMesh": ("mesh", 1),
}
"""The functions that make groups -> the argument that says of which ranks: its name and place."""

MOST_ORIGINS = 2


def with_origins_of_groups(view: View, lines: Sequence[PointedLine]) -> list[PointedLine]:
    """The lines, and beside the first one that makes groups those that computed their ranks."""
    known = {one.line for one in lines}
    for number, one in enumerate(lines):
        origins = [origin for origin in _origins(view, one.line) if origin.line not in known]
        if origins:
            if one.note:
                told = f"; line {one.line.number} {one.note}"
                origins = [replace(origin, note=origin.note + told) for origin in origins]
            del origins[MOST_ORIGINS:]
            if any(origin.is_fault for origin in origins):
                pair = [*origins, replace(one, is_fault=False)]
            else:
                pair = [one, *origins]
            return [*lines[:number], *pair, *lines[number + 1 :]]
    return list(lines)


def _origins(view: View, line: CodeLine) -> list[PointedLine]:
    """The lines that computed the ranks of the groups that this line has made."""
    rank = min(view.observed.by_rank, default=0)
    found: dict[CodeLine, list[tuple[int, ...]]] = {}
    computing: set[CodeLine] = set()
    for call in _made_at(view, rank, line):
        link = _origin(view, rank, call)
        if link is not None and link.line != line:
            found.setdefault(link.line, []).append(tuple(call.ranks))
            if link.selects or _computes(link):
                computing.add(link.line)
    groups_of = {origin: tuple(sorted(set(ranks))) for origin, ranks in found.items()}
    shown = []
    for origin, groups in groups_of.items():
        alike = [one for one, others in groups_of.items() if others == groups]
        again = f", as line {alike[0].number} does" if origin != alike[0] else ""
        # Of lines that make the same groups, the first one may well be right.
        is_fault = origin in computing and (origin != alike[0] or len(alike) == 1)
        shown.append(PointedLine(origin, f"makes {groups_text(groups)}{again}", is_fault))
    return sorted(shown, key=lambda one: not one.is_fault)


def _made_at(view: View, rank: int, line: CodeLine) -> Iterator[Call]:
    """The groups that a line has made; those in which gradients were reduced, if it made some."""
    seen = view.observed.by_rank.get(rank)
    of_all_steps = StepCalls({} if seen is None else {rank: seen.calls})
    used = {
        frozenset(call.collective.ranks)
        for seen in view.observed.by_rank.values()
        for call in seen.calls
        if call.collective is not None and reduces_gradients(call)
    }
    for place in of_all_steps.places(Kind.NEW_GROUP):
        if place.line == line:
            in_use = [call for call in place.calls if frozenset(call.ranks) in used]
            yield from in_use or place.calls


def _origin(view: View, rank: int, call: Call) -> Link | None:
    """The line that computed the ranks of a group, or else where they come from."""
    line = call.users_line or call.line
    place = place_of(line.file, line.number) if line is not None else None
    given = _given(place.statement) if place is not None else None
    if line is None or place is None or given is None:
        return None
    callers = [one for one in call.callers if (one.file, one.number) != (line.file, line.number)]
    links = links_of(run_lines(view, rank), place, given, callers)
    return next((one for one in links if one.selects or _computes(one)), chosen(links))


def _computes(link: Link) -> bool:
    """True if the line computes the value that it names, and does not only pass it on."""
    place = place_of(link.line.file, link.line.number)
    statement = place.statement if place is not None else None
    if not isinstance(statement, ast.Assign) or not statement.targets:
        return False
    target = statement.targets[0]
    name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
    return name == link.name and any(
        isinstance(node, ast.BinOp | ast.Compare | ast.ListComp) for node in ast.walk(statement)
    )


def _given(statement: ast.stmt) -> ast.expr | None:
    """The expression that says of which ranks the groups are to be."""
    for node in (statement, *inside(statement)):
        name = called_name(node) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name in GIVEN:
            argument, at = GIVEN[name]
            named = [one.value for one in node.keywords if one.arg == argument]
            return next(iter(named or node.args[at : at + 1]), None)
    return None
