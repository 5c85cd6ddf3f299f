"""What the classes of a file have: attributes, with what the source says of their values."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddp_equivalence.diagnosis.repairs.names_in_scope import arguments_of, kind_of


def attributes_of_classes(tree: ast.AST) -> list[dict[str, str]]:
    """For each class its fields, and what it sets on ``self``, with a description or ""."""
    return [dict(_attributes(node)) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                yield name, ast.unparse(annotation)
            case ast.FunctionDef():
                yield from _set_by(statement)
            case _:
                pass


def _set_by(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    annotations = {
        one.arg: ast.unparse(one.annotation)
        for one in arguments_of(function)
        if one.annotation is not None
    }
    for node in ast.walk(function):
        match node:
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value
            ):
                known = annotations.get(value.id, "") if isinstance(value, ast.Name) else ""
                yield name, known or kind_of(value)
            case ast.AnnAssign(
                target=ast.Attribute(value=ast.Name(id="self"), attr=name), annotation=annotation
            ):
                yield name, ast.unparse(annotation)
            case _:
                pass
