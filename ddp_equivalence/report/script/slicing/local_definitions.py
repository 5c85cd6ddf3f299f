"""Find the source of lambdas, and of functions and classes that are defined in a function.

A script defines them at its top level, so it needs the values of their free variables.
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from ddp_equivalence.report.script.slicing.no_source import NoSource
from ddp_equivalence.report.script.slicing.scopes import Scopes
from ddp_equivalence.report.script.slicing.source import Source
from ddp_equivalence.report.script.slicing.source_module import SourceModule

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


@dataclass(frozen=True)
class LocalDefinition:
    """``free_variables``: the values that the definition takes from the functions around it.

    ``defaults``: its default arguments with their values, which were computed in those functions.
    """

    node: Node
    free_variables: dict[str, Any]
    defaults: tuple[tuple[ast.expr, Any], ...] = field(default=())

    @property
    def name(self) -> str:
        """Its own name; empty for a lambda."""
        return getattr(self.node, "name", "")

    def span(self, source: Source) -> tuple[int, int]:
        """The start and end of its text: whole lines; a lambda from its parameters on."""
        start, end = source.span(self.node)
        if isinstance(self.node, ast.Lambda):
            return start + len("lambda"), end
        decorators = [decorator.lineno for decorator in self.node.decorator_list]
        return source.position(min([self.node.lineno, *decorators]), 0), end

    def at_top_level(self, text: str, output: str) -> str:
        """Its text as a definition at the top level of a script, under the name ``output``."""
        if isinstance(self.node, ast.Lambda):
            return _lambda_as_function(text, output)
        lines = text.splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        lines = [line[indent:] if not line[:indent].strip() else line for line in lines]
        for number, line in enumerate(lines):
            if line.startswith(("def ", "async def ", "class ")):
                lines[number] = line.replace(f" {self.name}", f" {output}", 1)
                break
        return "\n".join(lines)

    def check_names(self, scopes: Scopes, module: SourceModule) -> None:
        """Raise NoSource if it uses a name whose value is not known.

        Python keeps the values that a function takes from the functions around it, but not those
        that the body of a class takes.
        """
        for free in scopes.free_names:
            known = free.name in self.free_variables or free.name in module.namespace
            if not known and not hasattr(builtins, free.name) and not free.in_signature:
                subject = self.name or "the lambda"
                raise NoSource(f"{subject} uses {free.name} of the function around it")


def local_definition(source: Source, value: FunctionType | type) -> LocalDefinition:
    """Find the definition of a function or class in its file.

    Raises NoSource if it is no longer there, or if it needs more from outside than values.
    """
    if isinstance(value, type):
        return LocalDefinition(_class_node(source, value), _free_variables_of_class(value))
    node = _function_node(source, value)
    free_variables = {}
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            free_variables[name] = cell.cell_contents
        except ValueError:
            raise NoSource(f"{name} has no value yet") from None
    for part in ast.walk(node):
        if isinstance(part, ast.Nonlocal) and set(part.names) & free_variables.keys():
            raise NoSource(f"it sets {', '.join(part.names)} of the function around it")
    return LocalDefinition(node, free_variables, _defaults(node, value))


def _function_node(source: Source, value: FunctionType) -> ast.FunctionDef | ast.Lambda:
    code = value.__code__
    is_lambda = value.__name__ == "<lambda>"
    candidates: list[Any] = []
    for node in ast.walk(source.tree):
        if is_lambda and isinstance(node, ast.Lambda) and _is_lambda_of(node, code):
            candidates.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            decorators = [decorator.lineno for decorator in node.decorator_list]
            if min([node.lineno, *decorators]) == code.co_firstlineno:
                candidates.append(node)
    if not candidates:
        raise NoSource(f"{value.__qualname__} is not in {source.file} any more")
    innermost: ast.FunctionDef | ast.Lambda = min(
        candidates, key=lambda node: node.end_lineno - node.lineno
    )
    return innermost


def _is_lambda_of(node: ast.Lambda, code: CodeType) -> bool:
    """True if this code was compiled from this lambda; there may be several in a line."""
    if node.lineno != code.co_firstlineno:
        return False
    start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    instructions = [
        ((line, column), (end_line, end_column))
        for line, end_line, column, end_column in code.co_positions()
        if None not in (line, end_line, column, end_column) and (column, end_column) != (0, 0)
    ]
    inner_lambdas = [inner for inner in ast.walk(node.body) if isinstance(inner, ast.Lambda)]
    if any(_is_lambda_of(inner, code) for inner in inner_lambdas):
        return False
    return all(start <= first and last <= end for first, last in instructions)


def _class_node(source: Source, value: type) -> ast.ClassDef:
    name = value.__qualname__.rpartition(".")[2]
    nodes = [n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef) and n.name == name]
    if len(nodes) != 1:
        raise NoSource(f"there are {len(nodes)} classes {name} in {source.file}")
    return nodes[0]


def _free_variables_of_class(value: type) -> dict[str, Any]:
    """The values that the methods of a class take from the functions around the class."""
    values: dict[str, Any] = {}
    for method in vars(value).values():
        if isinstance(method, FunctionType):
            cells = zip(method.__code__.co_freevars, method.__closure__ or (), strict=True)
            values |= {name: cell.cell_contents for name, cell in cells if name != "__class__"}
    return values


def _defaults(node: Any, value: FunctionType) -> tuple[tuple[ast.expr, Any], ...]:
    arguments = node.args
    pairs = list(zip(arguments.defaults, value.__defaults__ or (), strict=True))
    keyword_values = value.__kwdefaults__ or {}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            pairs.append((default, keyword_values[argument.arg]))
    return tuple(pairs)


def _lambda_as_function(text: str, output: str) -> str:
    """A function of that name from the text of a lambda after its first word: ``" x: x + 1"``."""
    whole = f"(lambda{text}\n)"
    node = ast.parse(whole, mode="eval").body
    assert isinstance(node, ast.Lambda)
    source = Source("", whole)
    # There may be an opening bracket between the colon and the body.
    head = source.bytes[: source.span(node.body)[0]].decode()
    first, *more = whole[head.rindex(":") + 1 : -1].strip().splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in more if line.strip()), default=0)
    body = "\n".join([first, *(f"    {line[indent:]}" for line in more)])
    if more and first[0] not in "([{":
        body = f"({body}\n    )"
    return f"def {output}({ast.unparse(node.args)}):\n    return {body}"
