"""The lines that call a method of the module inside a wrapper, past the wrapper's own forward."""

from __future__ import annotations

import ast

from ddp_equivalence.diagnosis.lines.attributes import line_in_function
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.lines.source_tree import tree_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View

NOT_A_FORWARD = frozenset(
    {"parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules"}
    | {"state_dict", "load_state_dict", "train", "eval", "zero_grad", "children", "to"}
    | {"requires_grad_", "apply", "named_children", "register_buffer", "get_submodule"}
)
"""Methods of a module that compute nothing."""


def lines_past_the_wrapper(view: View) -> list[PointedLine]:
    """The lines that have run and call ``ddp.module(...)`` or ``ddp.module.method(...)``."""
    run = run_lines(view, min(view.observed.by_rank, default=0))
    found: dict[tuple[str, int], PointedLine] = {}
    for file in run.files:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, ast.Call) or not _is_past_a_wrapper(node.func):
                continue
            line = line_in_function(file, node.lineno)
            if line is not None and run.times.get(line):
                note = f"calls {ast.unparse(node.func)}, which DDP does not see"
                found[file, line.number] = PointedLine(line, note, is_fault=True)
    return list(found.values())


def _is_past_a_wrapper(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr == "module":
        return True
    inner = function.value
    is_of_the_module = isinstance(inner, ast.Attribute) and inner.attr == "module"
    return is_of_the_module and function.attr not in NOT_A_FORWARD
