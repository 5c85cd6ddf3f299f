"""Which calls pass what to the arguments of a function."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from ddp_equivalence.diagnosis.lines.attributes import line_in_function
from ddp_equivalence.diagnosis.lines.run_lines import RunLines
from ddp_equivalence.diagnosis.lines.source_tree import Function, called_name, tree_of
from ddp_equivalence.measurement.calls import CodeLine


def name_in_calls(file: str, function: Function) -> str:
    """The name by which a function is called: that of its class for a constructor."""
    tree = tree_of(file)
    if function.name == "__init__" and tree is not None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and function in node.body:
                return node.name
    return function.name


def argument_given(
    call: ast.Call, names: Sequence[str], name: str, constructs: bool
) -> ast.expr | None:
    """The expression that a call gives for an argument; None if it does not say so plainly."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if name not in names or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    bound = isinstance(call.func, ast.Attribute) and names[0] in ("self", "cls")
    at = names.index(name) - (1 if bound or constructs else 0)
    return call.args[at] if 0 <= at < len(call.args) else None


def callers_by_name(run: RunLines, name: str) -> list[CodeLine]:
    """The only line that has run and calls a function of this name; [] if there are several."""
    found: dict[CodeLine, None] = {}
    for file in run.files:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Call) and called_name(node) == name:
                line = line_in_function(file, node.lineno)
                if line is not None and run.times.get(line):
                    found[line] = None
    return list(found) if len(found) == 1 else []
