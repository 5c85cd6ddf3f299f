"""The lines that made what a wrapper, a hook or a class of torch was given."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ddp_equivalence.diagnosis.lines.arguments import argument_given
from ddp_equivalence.diagnosis.lines.bindings import Bindings, Bound
from ddp_equivalence.diagnosis.lines.run_lines import RunLines
from ddp_equivalence.diagnosis.lines.source_tree import called_name, inside, is_in_class, place_of
from ddp_equivalence.diagnosis.lines.sources import Source, Sources
from ddp_equivalence.measurement.calls import CodeLine

MOST_NAMES = 8
"""Through so many names an expression is followed to where it is made."""


def argument_of_line(line: CodeLine, names: Sequence[str]) -> list[Bound]:
    """What a call on this line gives by keyword for one of these arguments."""
    place = place_of(line.file, line.number)
    nodes = [place.statement, *inside(place.statement)] if place is not None else []
    return [
        (place, keyword.value)
        for node in nodes
        if isinstance(node, ast.Call) and place is not None
        for keyword in node.keywords
        if keyword.arg in names and node.lineno <= line.number <= (node.end_lineno or node.lineno)
    ]


def given_to_class(
    run: RunLines, kind: str, arguments: Sequence[str], name: str
) -> Iterator[Bound]:
    """What the calls that have run give a class of this name for one of its arguments."""
    for place, call in Bindings(run).calls():
        if called_name(call) == kind:
            value = argument_given(call, ["self", *arguments], name, constructs=True)
            if value is not None:
                yield place, value


def set_in_class(run: RunLines, kind: str, name: str) -> list[Bound]:
    """What the code of a class of this name sets an attribute to."""
    attribute = ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load())
    found = Bindings(run).of_attribute(attribute)
    return [(place, value) for place, value in found if is_in_class(place.line(value), kind)]


def sole_origin(run: RunLines, bound: Bound) -> Bound | None:
    """The only expression that made a value, through names and functions of the user's; None if
    there are several.
    """
    sources = Sources(run)
    for _ in range(MOST_NAMES):
        given = sources.bound(*bound)
        if not given:
            return bound
        if len(given) != 1:
            return None
        bound = given[0]
    return None


def lines_that_made(run: RunLines, bound: Bound) -> list[CodeLine]:
    """The lines that computed what is given here, then those that set what went into it.

    The lines of functions come first, since what stands outside of them is far away.
    """
    place, expression = bound
    sources = Sources(run).of([Source(place, expression, False)])
    if isinstance(expression, (ast.Name, ast.Attribute)):
        sources = sources[1:]  # this line only hands on what another one made
    first = place.function.name if place.function is not None else ""
    sources.sort(
        key=lambda one: (
            one.place.function is None,
            not one.computes,
            one.place.function is None or one.place.function.name != first,
        )
    )
    return list(dict.fromkeys(one.line for one in sources))
