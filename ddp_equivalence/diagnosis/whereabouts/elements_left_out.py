"""Some elements of a gradient are the rank's own, and all others are right."""

from __future__ import annotations

import ast

import torch

from ddp_equivalence.diagnosis.lines.decisions import lines_that_set_variable
from ddp_equivalence.diagnosis.lines.lines_around_reduction import way_to
from ddp_equivalence.diagnosis.lines.origins import chosen, links_of, links_of_line
from ddp_equivalence.diagnosis.lines.run_lines import RunLines, run_lines
from ddp_equivalence.diagnosis.lines.source_tree import Place as AtLine
from ddp_equivalence.diagnosis.lines.source_tree import called_name, inside, place_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import REDUCING, Place
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, named
from ddp_equivalence.measurement.calls import CodeLine

FEWEST = 2
"""So many elements, on all ranks together, must be the ranks' own before this is said."""


def elements_left_out(pieces: Pieces) -> Whereabouts | None:
    """None unless single elements of a parameter are, on each rank, what the rank computed."""
    view = pieces.view
    found = _own_elements(pieces)
    sizes = {name: view.parameters.total_of([name]) for name in found}
    if not found or all(len(one) == sizes[name] for name, one in found.items()):
        return None
    texts = [_text(name, one, sizes[name]) for name, one in found.items()]
    several = len(texts) > 1 or max(map(len, found.values())) > 1
    are = "are" if several else "is"
    what = named(texts)
    note = f"{what} {'stay' if several else 'stays'} the rank's own"
    places = [place for place in view.observed.calls.reductions if not place.first.in_backward]
    return Whereabouts(
        "reduction",
        "some elements of a gradient stay each rank's own",
        f"{what[:1].upper()}{what[1:]} {are}, on each rank, what the rank itself computed; all "
        "other elements are right.",
        distinct(
            [
                *(line for place in places[:1] for line in _slice(pieces, place)),
                *(place.pointed(note, is_fault=True) for place in places[:1]),
            ]
        ),
        fix=f"reduce all {view.parameters.total} elements.",
    )


def _own_elements(pieces: Pieces) -> dict[str, list[int]]:
    """Parameter -> its elements that are each rank's own; empty unless all others are right."""
    view = pieces.view
    ranks = view.setting.reporting_ranks
    held, own = view.measured.by_rank, pieces.own[list(ranks)]
    if len(ranks) < FEWEST or not bool(held.isfinite().all()):
        return {}
    most = float(view.expected.abs().max()) * pieces.tolerance
    wrong = ((held - view.expected).abs() > most).any(0)
    if int(wrong.sum()) * len(ranks) < FEWEST or bool(wrong.all()):
        return {}
    if bool(((held - own)[:, wrong].abs() > most).any()):
        return {}
    if not bool(((own - own[0])[:, wrong].abs() > most).any(0).all()):
        return {}  # what all ranks have computed alike may have been reduced
    found = {}
    for name, place in view.parameters.places.items():
        numbers = torch.nonzero(wrong[place]).flatten().tolist()
        if numbers and place.stop - place.start != view.parameters.total_of([name]):
            return {}  # a sample does not say which elements these are
        if numbers:
            found[name] = numbers
    return found


def _text(name: str, numbers: list[int], size: int) -> str:
    """Elements as text, counted from 0: ``elements 4 to 5 of fc.bias``."""
    if len(numbers) == size:
        return name
    if len(numbers) == 1:
        return f"element {numbers[0]} of {name}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"elements {numbers[0]} to {numbers[-1]} of {name}"
    return f"{len(numbers)} elements of {name}"


def _made_at(run: RunLines, at: AtLine, name: str) -> CodeLine | None:
    """The only line that gives a variable a tensor; those that change it in place do not count."""
    lines = [
        line
        for line in lines_that_set_variable(run, at, name)
        if (place := place_of(line.file, line.number)) is not None
        and not isinstance(place.statement, ast.AugAssign)
    ]
    return lines[0] if len(lines) == 1 else None


def _slice(pieces: Pieces, place: Place) -> list[PointedLine]:
    """The line that takes the part of a tensor which a collective is given."""
    run = run_lines(pieces.view, place.ranks[0])
    at = place_of(place.line.file, place.line.number)
    for node in [at.statement, *inside(at.statement)] if at is not None else ():
        if isinstance(node, ast.Call) and called_name(node) in REDUCING and node.args:
            assert at is not None
            way = way_to(pieces.view, place.first)
            given = node.args[0]
            links = links_of(run, at, given, way[1:])
            if not links and isinstance(given, ast.Name):
                made_at = _made_at(run, at, given.id)
                links = links_of_line(run, made_at) if made_at is not None else []
            link = chosen(links)
            if link is not None and link.selects and link.line != place.line:
                note = f"takes the part that line {place.line.number} reduces"
                return [PointedLine(link.line, note, True)]
    return []
