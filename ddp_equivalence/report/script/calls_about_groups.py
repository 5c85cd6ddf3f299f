"""Finds calls in a script that would start its process group again, or end it too early."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.report.script.template.process_group import join_process_group

CALLS = ("init_process_group", "destroy_process_group")
CONDITION = "is_initialized"


def call_about_groups(script: str) -> str:
    """The first call of the step's own that starts or ends the group, as it is written; else "".

    A call below ``if not dist.is_initialized()`` is none: it does not take place in a script.
    """
    return next(_calls(ast.parse(script)), "")


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == join_process_group.__name__:
            continue
        if isinstance(node, ast.If) and CONDITION in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in CALLS:
            yield ast.unparse(node)
        yield from _calls(node)
