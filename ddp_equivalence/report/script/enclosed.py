"""Lambdas, and functions and classes made inside of functions, with what they see there."""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from ddp_equivalence.report.script.literals import NoSource
from ddp_equivalence.report.script.names import Found
from ddp_equivalence.report.script.origin import Origin
from ddp_equivalence.report.script.source import Source


@dataclass(frozen=True)
class Enclosed:
    """``values``: of the names of the functions around it. ``defaults``: with their values, since
    they were computed there.
    """

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda | None = None
    values: dict[str, Any] = field(default_factory=dict)
    defaults: tuple[tuple[ast.expr, Any], ...] = ()

    def span(self, source: Source) -> tuple[int, int]:
        """The text of the definition: whole lines, or of a lambda from its arguments on."""
        node = self.node
        start, end = source.span(node)
        if isinstance(node, ast.Lambda):
            return start + len("lambda"), end
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) if node else 1
        return source.at(first, 0), end

    def as_definition(self, text: str, output: str) -> str:
        """The same at the top level of a script, under this name."""
        node = self.node
        if isinstance(node, ast.Lambda):
            return _as_function(text, output)
        lines = text.splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        lines = [line[indent:] if not line[:indent].strip() else line for line in lines]
        name = getattr(node, "name", "")
        for place, line in enumerate(lines):
            if line.startswith(("def ", "async def ", "class ")):
                lines[place] = line.replace(f" {name}", f" {output}", 1)
                break
        return "\n".join(lines)

    def unknown(self, found: Found, origin: Origin) -> str:
        """A name that is neither a global one nor one whose value is known here."""
        for use in found.uses:
            known = use.name in self.values or use.name in origin.namespace
            if not known and not hasattr(builtins, use.name) and not use.annotation:
                return use.name
        return ""


def enclosed(source: Source, value: FunctionType | type) -> Enclosed:
    """Find the definition of a function or class in its file. Raises NoSource if it is gone."""
    if isinstance(value, type):
        node = _class_of(source, value)
        return Enclosed(node, _values_of_class(value))
    found = _function_of(source, value)
    values = {}
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:
            raise NoSource(f"{name} has no value yet") from None
    for part in ast.walk(found):
        if isinstance(part, ast.Nonlocal) and set(part.names) & values.keys():
            raise NoSource(f"it sets {', '.join(part.names)} of the function around it")
    return Enclosed(found, values, _defaults(found, value))


def _function_of(source: Source, value: FunctionType) -> ast.FunctionDef | ast.Lambda:
    code = value.__code__
    found: list[Any] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Lambda) and value.__name__ == "<lambda>" and _holds(node, code):
            found.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            lines = [node.lineno, *(one.lineno for one in node.decorator_list)]
            if min(lines) == code.co_firstlineno:
                found.append(node)
    if not found:
        raise NoSource(f"{value.__qualname__} is not in {source.file} any more")
    innermost: ast.FunctionDef | ast.Lambda = min(
        found, key=lambda one: one.end_lineno - one.lineno
    )
    return innermost


def _holds(node: ast.Lambda, code: CodeType) -> bool:
    """Is this the lambda of the code? There may be several in a line."""
    if node.lineno != code.co_firstlineno:
        return False
    start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    places = [
        ((line, column), (end_line, end_column))
        for line, end_line, column, end_column in code.co_positions()
        if None not in (line, end_line, column, end_column) and (column, end_column) != (0, 0)
    ]
    inner = [one for one in ast.walk(node.body) if isinstance(one, ast.Lambda)]
    if any(_holds(one, code) for one in inner):
        return False
    return all(start <= first and last <= end for first, last in places)


def _class_of(source: Source, value: type) -> ast.ClassDef:
    name = value.__qualname__.rpartition(".")[2]
    found = [n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef) and n.name == name]
    if len(found) != 1:
        raise NoSource(f"there are {len(found)} classes {name} in {source.file}")
    return found[0]


def _values_of_class(value: type) -> dict[str, Any]:
    """What its methods see of the function around it."""
    values: dict[str, Any] = {}
    for method in vars(value).values():
        if isinstance(method, FunctionType):
            for name, cell in zip(
                method.__code__.co_freevars, method.__closure__ or (), strict=True
            ):
                if name != "__class__":
                    values[name] = cell.cell_contents
    return values


def _defaults(node: Any, value: FunctionType) -> tuple[tuple[ast.expr, Any], ...]:
    own = node.args
    pairs = list(zip(own.defaults, value.__defaults__ or (), strict=True))
    named = value.__kwdefaults__ or {}
    for argument, default in zip(own.kwonlyargs, own.kw_defaults, strict=True):
        if default is not None:
            pairs.append((default, named[argument.arg]))
    return tuple(pairs)


def _as_function(text: str, output: str) -> str:
    """``" generator: body"``, of a lambda, as a function of that name."""
    whole = f"(lambda{text}\n)"
    node = ast.parse(whole, mode="eval").body
    assert isinstance(node, ast.Lambda)
    source = Source("", whole)
    # Between the colon and the body there may be an opening bracket.
    head = source.bytes[: source.span(node.body)[0]].decode()
    first, *more = whole[head.rindex(":") + 1 : -1].strip().splitlines()
    indent = min((len(one) - len(one.lstrip()) for one in more if one.strip()), default=0)
    body = "\n".join([first, *(f"    {one[indent:]}" for one in more)])
    own = ast.unparse(node.args)
    if more and first[0] not in "([{":
        body = f"({body}\n    )"
    return f"def {output}({own}):\n    return {body}"
