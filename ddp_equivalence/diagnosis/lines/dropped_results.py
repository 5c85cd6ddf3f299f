"""Lines that compute something from a gradient, and whose result nothing uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.lines.run_lines import RunLines, run_lines
from ddp_equivalence.diagnosis.lines.source_tree import (
    FUNCTIONS,
    LOOPS,
    Function,
    called_name,
    inside,
    place_of,
    tree_of,
)
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine, Kind

NO_VALUES = frozenset({"requires_grad", "detach"})
"""Attributes and methods that change no values."""

LATE = "register_post_accumulate_grad_hook"

NEVER = "computes this and drops it; the gradient stays as it is"


def lines_of_dropped_results(view: View) -> list[PointedLine]:
    """The lines of hooks that compute a gradient in vain, or else one that forgets what it makes of
    ``.grad``.
    """
    return (_of_hooks(view) or _of_expressions(view))[:1]


def fix_of_dropped_results(view: View) -> str:
    """Use the result; "" if none was dropped."""
    for place in view.observed.calls.places(Kind.DROPPED):
        for one in _of_hooks(view)[:1]:
            replaces = place.first.names[0] != LATE and place.line == one.line
            what = "return from the hook" if replaces else "write to .grad"
            return f"{what} what line {one.line.number} computes."
    for one in lines_of_dropped_results(view):
        return f"write to .grad what line {one.line.number} computes."
    return ""


def _of_hooks(view: View) -> list[PointedLine]:
    """What hooks computed and did not give back, as far as no later line of theirs reads it."""
    found = []
    for place in view.observed.calls.places(Kind.DROPPED):
        name, by = place.first.what, place.first.names[0]
        if not _is_read_after(place.line, name):
            note = f"computes {name} and returns nothing: the old gradient stays"
            if by == LATE:
                note = f"computes {name} and does not write it to .grad"
            found.append(place.pointed(note, is_fault=True))
    return found


def _is_read_after(line: CodeLine, name: str) -> bool:
    """True if a variable that a line sets may be read later in the same function."""
    place = place_of(line.file, line.number)
    if place is None or place.function is None:
        return True
    end = place.statement.end_lineno or line.number
    own = set(map(id, ast.walk(place.statement)))
    loops = [one.statement for one in place.around if isinstance(one.statement, LOOPS)]
    in_loops = {id(node) for loop in loops for node in ast.walk(loop)} - own
    for node in ast.walk(place.function):
        if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
            return True
        is_read = isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        if is_read and (getattr(node, "lineno", 0) > end or id(node) in in_loops):
            return True
    return False


def _of_expressions(view: View) -> list[PointedLine]:
    """The statements that have run and are nothing but a new tensor made of a gradient."""
    rank = min(view.observed.by_rank, default=0)
    run = run_lines(view, rank)
    hooks = {
        (place.first.made_at.file, place.first.made_at.function)
        for place in view.observed.calls.places(Kind.TENSOR_HOOK)
        if place.first.made_at is not None and place.first.what == "register_hook"
    }
    found = []
    for file in run.files:
        tree = tree_of(file)
        for function in ast.walk(tree) if tree is not None else ():
            if isinstance(function, FUNCTIONS):
                is_hook = (file, function.name) in hooks
                found += [
                    PointedLine(line, NEVER, True)
                    for line in _dropped_in(run, file, function, is_hook)
                ]
    return found


def _dropped_in(run: RunLines, file: str, function: Function, is_hook: bool) -> Iterator[CodeLine]:
    gradients, lists = _names_of_gradients(function)
    if is_hook:
        arguments = [one.arg for one in function.args.args if one.arg not in ("self", "cls")]
        gradients |= set(arguments[-1:])
    for node in inside(function):
        if not isinstance(node, ast.Expr):
            continue
        line = CodeLine(file, node.lineno, function.name)
        names = gradients
        if isinstance(node.value, ast.Call) and called_name(node.value).startswith("_foreach_"):
            names = lists
        if run.times.get(line) and any(_is_gradient(one, names) for one in _made_of(node.value)):
            yield line


def _made_of(value: ast.expr) -> list[ast.expr]:
    """What an expression makes a new tensor of, if it does nothing else; [] if it may."""
    if isinstance(value, ast.BinOp):
        return [value.left, value.right]
    if not isinstance(value, ast.Call) or any(one.arg == "out" for one in value.keywords):
        return []
    name = called_name(value)
    if name.startswith("_foreach_") and not name.endswith("_"):
        return value.args[:1]
    if not hasattr(Tensor, f"{name}_") or not hasattr(Tensor, name) or name in NO_VALUES:
        return []
    function = value.func
    if not isinstance(function, ast.Attribute):
        return []
    if isinstance(function.value, ast.Name) and function.value.id == torch.__name__:
        return value.args[:1]
    return [function.value]


def _is_gradient(expression: ast.expr, names: set[str]) -> bool:
    """True for ``p.grad``, a part of it, and the variables that hold such."""
    while isinstance(expression, ast.Subscript) or (
        isinstance(expression, ast.Attribute) and expression.attr == "data"
    ):
        expression = expression.value
    if isinstance(expression, ast.Attribute):
        return expression.attr == "grad"
    return isinstance(expression, ast.Name) and expression.id in names


def _names_of_gradients(function: Function) -> tuple[set[str], set[str]]:
    """The variables that are set to ``.grad`` of something, or go through a list of such; and those
    that are such lists.
    """
    found: set[str] = set()
    others: set[str] = set()
    lists: set[str] = set()
    for node in inside(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            if not isinstance(target, ast.Name):
                continue
            if _is_gradient(value, set()):
                found.add(target.id)
            elif isinstance(value, ast.ListComp) and _is_gradient(value.elt, set()):
                lists.add(target.id)
            else:
                others.add(target.id)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            through = node.iter
            is_list = isinstance(through, ast.Name) and through.id in lists
            made = isinstance(through, ast.ListComp | ast.GeneratorExp)
            if is_list or (made and _is_gradient(through.elt, set())):  # type: ignore[attr-defined]
                found.add(node.target.id)
            else:
                others.add(node.target.id)
    return found - others, lists - others
