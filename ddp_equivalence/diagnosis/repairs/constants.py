"""Edits of numbers, truth values and strings."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.change import Change, Place

MOST_STRINGS = 4

# A smaller number only keeps a division from failing.
MARGIN = 1e-4

# Variables of the environment that are mixed up, and axes of a mesh.
MIXED_UP = (
    ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"),
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("sum", "mean", "none"),
)


def another_number(node: ast.Constant, place: Place) -> Iterator[Change]:
    """A number is one too large or too small, has the wrong sign, or names another dimension."""
    value = node.value
    if isinstance(value, int) and not isinstance(value, bool):
        negative = isinstance(place.parent(node), ast.UnaryOp)
        others = (1, 0, value + 1, value - 1) if negative else (value + 1, value - 1, -value, 0, 1)
        for other in dict.fromkeys(others):
            if other != value:
                yield place.replaced(node, str(other))
    elif isinstance(value, float):
        rest = (round(1 - value, 12),) if MARGIN < value < 1 - MARGIN else ()
        for fraction in dict.fromkeys((1.0, 0.0, *rest)):
            if fraction != value and abs(value) > MARGIN:
                yield place.replaced(node, repr(fraction))


def the_other_truth_value(node: ast.Constant, place: Place) -> Iterator[Change]:
    """An option is on where it should be off."""
    if isinstance(node.value, bool):
        yield place.replaced(node, str(not node.value))


def another_string(node: ast.Constant, place: Place) -> Iterator[Change]:
    """Another key, name of a dimension or option was meant, which the file uses elsewhere."""
    if not isinstance(node.value, str):
        return
    known = [other for group in MIXED_UP if node.value in group for other in group]
    others = dict.fromkeys([*known, *place.facts.strings.exchangeable(node)])
    for other in [one for one in others if one != node.value][:MOST_STRINGS]:
        yield place.replaced(node, _quoted(other, place.text(node)))


def _quoted(value: str, like: str) -> str:
    quoted = repr(value)
    plain = quoted[1:-1]
    return f'"{plain}"' if like.startswith('"') and '"' not in plain else quoted
