"""Lines that write into what a method of ``.grad`` returned, which may be a copy of it."""

from __future__ import annotations

import ast

from ddp_equivalence.diagnosis.lines.attributes import line_in_function
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.lines.source_tree import called_name, tree_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View

MAY_COPY = frozenset({"reshape", "flatten", "ravel", "contiguous", "clone", "to", "float"})
"""Methods that return a copy, or, for some layouts and types, the tensor itself or a view of it."""


def lines_into_temporaries(view: View, unchanged: str) -> list[PointedLine]:
    """The first such line that ran after backward began. ``unchanged``: whose gradients are not
    written in the end, as text.
    """
    run = run_lines(view, min(view.observed.by_rank, default=0))
    begun = max((run.last.get(at, 0) for at in run.backwards), default=0)
    for file in run.files:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            method = _method_written_to(node)
            line = line_in_function(file, getattr(node, "lineno", 0)) if method else None
            if line is not None and run.last.get(line, 0) > begun:
                note = f"writes to what {method}() returns; .grad of {unchanged} is not written"
                return [PointedLine(line, note, True)]
    return []


def _method_written_to(node: ast.AST) -> str:
    """``reshape`` of ``p.grad.reshape(-1).copy_(...)``; "" for anything else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    made = node.func.value
    if node.func.attr != "copy_" or not isinstance(made, ast.Call):
        return ""
    of = made.func.value if isinstance(made.func, ast.Attribute) else None
    is_gradient = isinstance(of, ast.Attribute) and of.attr == "grad"
    return called_name(made) if is_gradient and called_name(made) in MAY_COPY else ""
