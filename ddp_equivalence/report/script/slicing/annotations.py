"""Take type annotations out of definitions that come into a script."""

from __future__ import annotations

import ast
import re

from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.slicing.scopes import Function, parameters
from ddp_equivalence.report.script.slicing.sliceable import is_own_module
from ddp_equivalence.report.script.slicing.source import Edit, Source
from ddp_equivalence.report.script.slicing.source_module import SourceModule


def signature_annotations(source: Source, function: Function) -> list[tuple[ast.expr, Edit]]:
    """Every annotation in a function's signature, with the edit that takes it out."""
    removals = []
    for parameter in parameters(function.args):
        if parameter.annotation is not None:
            start = source.span(parameter)[0] + len(parameter.arg.encode())
            end = source.span(parameter.annotation)[1]
            equals = re.match(rb" *= *|", source.bytes[end:])
            assert equals is not None
            # "x: int = 1" becomes "x=1".
            removal = Edit(start, end + equals.end(), equals[0].decode().strip())
            removals.append((parameter.annotation, removal))
    if function.returns is not None:
        start, end = source.span(function.returns)
        arrow = source.bytes.rindex(b"->", 0, start)
        removal = Edit(len(source.bytes[:arrow].rstrip()), end, "")
        removals.append((function.returns, removal))
    return removals


def variable_annotation(source: Source, assignment: ast.AnnAssign) -> list[Edit]:
    """The edits that make ``name: type = value`` a plain assignment."""
    if assignment.value is None:
        return []
    end = source.span(assignment.target)[1]
    return [Edit(end, source.span(assignment.annotation)[1], "")]


def can_stay(module: SourceModule, annotation: ast.expr) -> bool:
    """True if a script can evaluate this annotation of a user's function.

    It cannot if a name in the annotation is bound only for type checkers, or comes from this
    package. ``Rank`` may stay, because every script contains it.
    """
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            value = module.namespace.get(node.id)
            if value is Rank:
                continue
            home = getattr(value, "__module__", None) or ""
            from_package = isinstance(home, str) and is_own_module(home)
            if from_package or node.id in module.source.type_checking_names:
                return False
    return True
