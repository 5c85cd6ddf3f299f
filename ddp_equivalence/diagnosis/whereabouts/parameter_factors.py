"""Some gradients are a multiple of the big batch's, and a line has multiplied just these."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from ddp_equivalence.diagnosis.lines.divided_by import divisors, last_setter_of_divisor
from ddp_equivalence.diagnosis.lines.number_text import scaling_text
from ddp_equivalence.diagnosis.lines.origins import Link
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.lines.source_tree import place_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, named, of_all
from ddp_equivalence.measurement.calls import Call

SAME = 1e-5
"""Factors whose relative difference is smaller are equal."""

FEWEST = 4
"""A parameter with fewer elements may be any multiple by chance."""

MOST_GROUPS = 3


def fault_of_parameter_factors(pieces: Pieces, total: Tensor, uniform: float) -> Whereabouts | None:
    """Which gradients have another factor, and the line that multiplied them.

    ``total``: what all ranks computed together, of which every rank holds ``uniform`` times. None
    if a gradient is no multiple of the big batch's, or if no line was seen to multiply it.
    """
    groups = _groups(pieces, total, uniform)
    wrong = {factor: names for factor, names in groups.items() if abs(factor - 1) > SAME}
    if not wrong or len(groups) > MOST_GROUPS or len(groups) < 2:
        return None
    view = pieces.view
    places = [
        (place, call.change.factor, factor)
        for factor, names in wrong.items()
        for place in view.observed.calls.changes(partial(_scales, names))
        for call in place.calls[:1]
        if call.change is not None and call.change.factor is not None
    ]
    if not places:
        return None
    every = view.parameters.names
    shown = [f"{of_all(names, every)}: {factor:.4g}" for factor, names in wrong.items()]
    rest = [name for name in every if all(name not in names for names in wrong.values())]
    others = " All others are right." if rest else ""
    sentence = f"In multiples of the big batch's, every rank holds {'; '.join(shown)}.{others}"
    lines = [line for one in places for line in _lines(pieces, *one)]
    names = tuple(name for of_factor in wrong.values() for name in of_factor)
    return Whereabouts(
        "reduction",
        f"{of_all(names, every)}: a wrong number multiplies them",
        sentence,
        distinct(lines),
        names,
        tuple(range(view.world_size)),
    )


def _groups(pieces: Pieces, total: Tensor, uniform: float) -> dict[float, tuple[str, ...]]:
    """How many times what they should be gradients are -> their names; {} if one is no multiple."""
    found: dict[float, list[str]] = {}
    small: list[tuple[str, float]] = []
    for name, place in pieces.view.parameters.places.items():
        right, own = pieces.view.expected[place], total[place]
        if not bool(own.any()) and not bool(right.any()):
            continue
        weight = pieces.factor_between(right, own)
        if weight is None:
            return {}
        if len(own) < FEWEST:
            small.append((name, uniform / weight))
            continue
        known = next((one for one in found if _alike(one, uniform / weight)), uniform / weight)
        found.setdefault(known, []).append(name)
    for name, factor in small:
        alike = next((one for one in found if _alike(one, factor)), None)
        if alike is None:
            return {}
        found[alike].append(name)
    return {factor: tuple(names) for factor, names in found.items()}


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * abs(other)


def _scales(names: tuple[str, ...], call: Call) -> bool:
    """True if a line multiplied some of these gradients, and no others, by a number."""
    change = call.change
    if change is None or change.factor is None or abs(change.factor - 1) <= SAME:
        return False
    return set(change.names) <= set(names)


def _lines(pieces: Pieces, place: Place, factor: float, times: float) -> list[PointedLine]:
    """The line that multiplies, what would be right there, and what set its number."""
    rank = place.ranks[0]
    right = factor / times
    number = f"{1 / right:.4g}" if 0 < abs(factor) < 1 else f"{right:.4g}"
    shown = 1 / float(f"{1 / factor:.5g}")  # it was recorded with few digits
    what = named(place.first.change.names[:1]) if place.first.change is not None else "gradients"
    note = f"{scaling_text(what, shown)}; with {number} it would be right"
    run = run_lines(pieces.view, rank)
    setters = []
    known: list[Link | None] = [*divisors(run, place.line)[:1]]
    for link in known or [last_setter_of_divisor(run, place.line)]:
        if link is None or link.line == place.line:
            continue
        at = place_of(link.line.file, link.line.number)
        begun = run.exact_count(at, at.statement) if at is not None else None
        often = f" {begun} times" if begun and begun > 1 else ""
        name = link.name or "the number"
        note_of_setter = f"sets {name}{often}, by which line {place.line.number} divides"
        setters.append(PointedLine(link.line, note_of_setter, True))
    return [*setters, replace(place.pointed(note), is_fault=True)]
