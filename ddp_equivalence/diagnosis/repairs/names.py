"""Edits that exchange names and attributes for others of the same function, class or file."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place
from ddp_equivalence.diagnosis.repairs.names_in_scope import likeness

# As many others are tried for one name: with and without descriptions of the values of a run.
MOST_MEASURED = 8
MOST_GUESSED = 3
MOST_ATTRIBUTES = 4

NUMBERS_OF_A_RANK = ("rank", "local_rank", "node", "world_size", "local_world_size", "nodes")

# Calls with one of these words in their name compute what a name often holds already.
STATISTICS = {
    *("mean", "sum", "max", "min", "amax", "amin", "var", "variance", "std", "norm", "average"),
    *("count", "numel", "len", "size", "number", "total", "moments", "detach"),
}


def another_name(node: ast.Name, place: Place) -> Iterator[Change]:
    """A name of the same function was meant, such as the part of a batch and not the whole."""
    scope = place.scope
    if node.id not in scope.names or node.id in ("self", "cls", "ctx"):
        return
    if place.is_called(node) and scope.description(node.id) != "function":
        return
    most = MOST_MEASURED if scope.measured else MOST_GUESSED
    for other in scope.names_like(node.id, place.first_line(node))[:most]:
        yield place.replaced(node, other)


def another_attribute(node: ast.Attribute, place: Place) -> Iterator[Change]:
    """Another attribute of the same object was meant, such as another process group."""
    if place.is_called(node) or _is_number_of_a_rank(node, place):
        return
    before = place.text(node.value)
    for other in _most_like(node.attr, place.facts.attributes_beside(node))[:MOST_ATTRIBUTES]:
        own, described = (place.scope.description(f"{before}.{one}") for one in (node.attr, other))
        if own == described or not (own and described):
            yield place.renamed(node, other)


def _is_number_of_a_rank(node: ast.Attribute, place: Place) -> bool:
    of_rank = place.text(node.value).rsplit(".", 1)[-1].strip("_") == "rank"
    return of_rank and node.attr in NUMBERS_OF_A_RANK


def attribute_left_out(node: ast.Attribute, place: Place) -> Iterator[Change]:
    """A part of an object was taken where the object itself was meant."""
    text = place.text(node.value)
    is_module = text.split(".")[0] in place.facts.modules
    if not (place.is_called(node) or is_module or text in ("self", "ctx", "cls", "super()")):
        yield place.replaced(node, text)


def name_for_call(node: ast.Call, place: Place) -> Iterator[Change]:
    """A statistic of this rank's part is computed anew, although that of all ranks is at hand."""
    called = place.called_name(node)
    words = set(called.strip("_").split("_"))
    if not words & STATISTICS:
        return
    names = [
        name
        for name in place.scope.names_before(place.first_line(node), called)
        if (place.scope.may_be_tensor(name) or place.scope.may_be_number(name))
        and name not in {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        and place.scope.description(name) != "function"
    ]
    for name in names[:MOST_GUESSED]:
        yield place.replaced(node, name)


def _most_like(name: str, others: list[str]) -> list[str]:
    return sorted((one for one in others if one != name), key=lambda one: -likeness(name, one))
