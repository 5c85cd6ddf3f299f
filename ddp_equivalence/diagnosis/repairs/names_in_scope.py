"""The names that a function can use, and which of them can stand for each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ddp_equivalence.diagnosis.repairs.source import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Values = Mapping[int, Mapping[str, str]]
"""The line of a function's ``def``, a name, and a text that describes its value."""

_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_NUMBERS = ("int", "float")
_COUNTING = {"num", "number", "count", "size", "length", "total", "n", "rows", "steps"}


@dataclass(frozen=True)
class Scope:
    """What the functions around a node have: names with their descriptions, and parameters.

    names: every name, with a description of its value, "" where nothing is known
    bound: the line from which on a name has a value
    function: the innermost function
    measured: whether the descriptions come from a run
    """

    function: Function
    names: dict[str, str] = field(default_factory=dict)
    bound: dict[str, int] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    measured: bool = False

    def description(self, text: str) -> str:
        """What is known of the value of a name, or of an attribute such as ``self.count``."""
        return self.names.get(text, "")

    def may_be_tensor(self, text: str) -> bool:
        """False where a run, or the source, shows a value that is no tensor."""
        known = self.description(text)
        return not known or known.casefold().startswith("tensor")

    def may_be_number(self, text: str) -> bool:
        """False where a run, or the source, shows a value that is no number."""
        known = self.description(text)
        return (not known and not self.measured) or known.startswith(_NUMBERS)

    def described_as_number(self, text: str) -> bool:
        """True where a run, or the source, shows a number."""
        return self.description(text).startswith(_NUMBERS)

    def names_like(self, name: str, line: int) -> list[str]:
        """Names that can stand where this one does: those most like it first."""
        own = self.description(name)
        return [
            other
            for other in self.names_before(line, name)
            if other != name and self._same(own, self.description(other))
        ]

    def counts(self) -> list[str]:
        """Names whose values are whole numbers; where nothing is known, whose words say so."""
        return [
            name
            for name, known in self.names.items()
            if known.startswith("int") or (not known and set(name.split("_")) & _COUNTING)
        ]

    def lengths(self) -> list[str]:
        """The lengths of what the function loops over, such as ``len(pieces)``."""
        found = []
        for node in ast.walk(self.function):
            if isinstance(node, ast.For):
                found += [one.id for one in ast.walk(node.iter) if isinstance(one, ast.Name)]
        return [f"len({name})" for name in dict.fromkeys(found) if name in self.names]

    def names_before(self, line: int, like: str) -> list[str]:
        """The names that have values at a line, those most like another name first."""
        names = [
            name
            for name in self.names
            if "." not in name
            and name not in ("self", "cls", "ctx", "_")
            and self.bound.get(name, 0) < line
        ]
        return sorted(names, key=lambda name: (-likeness(like, name), -self.bound.get(name, 0)))

    def _same(self, one: str, other: str) -> bool:
        if one and other:
            return one == other
        return not (self.measured and (one or other))


def likeness(one: str, other: str) -> int:
    """How many words two names share, and whether one is part of the other."""
    words = set(one.casefold().split("_")) & set(other.casefold().split("_")) - {""}
    return 2 * len(words) + (
        one.casefold() in other.casefold() or other.casefold() in one.casefold()
    )


def scope_of(node: ast.AST, source: Source, values: Values) -> Scope | None:
    """The names that a node can use; None outside functions."""
    around = [parent for parent in source.parents_of(node) if isinstance(parent, Function)]
    if not around:
        return None
    names: dict[str, str] = {}
    bound: dict[str, int] = {}
    parameters: list[str] = []
    measured = False
    for function in reversed(around):
        seen = _seen_in(function, values)
        measured = measured or bool(seen)
        parameters += [one.arg for one in arguments_of(function)]
        for name, line in _bound_in(function):
            inner = function is around[0]
            bound.setdefault(name, line if inner else 0)
            names[name] = seen.get(name, "" if seen else guess(name, function))
        names |= {name: text for name, text in seen.items() if "." in name}
    for target in _comprehension_targets(node, source):
        names[target], bound[target] = "", 0
    return Scope(around[0], names, bound, tuple(parameters), measured)


def arguments_of(function: Function) -> list[ast.arg]:
    """All parameters of a function."""
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return listed + [one for one in (arguments.vararg, arguments.kwarg) if one is not None]


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, _OWN_SCOPE):
            yield from own_nodes(child)


def _seen_in(function: Function, values: Values) -> Mapping[str, str]:
    decorators = getattr(function, "decorator_list", [])
    for line in (function.lineno, *(one.lineno for one in decorators[:1])):
        if line in values:
            return values[line]
    return {}


def _bound_in(function: Function) -> Iterator[tuple[str, int]]:
    for argument in arguments_of(function):
        yield argument.arg, 0
    inside = {
        id(target)
        for node in own_nodes(function)
        if isinstance(node, _COMPREHENSIONS)
        for one in node.generators
        for target in ast.walk(one.target)
    }
    for node in own_nodes(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if id(node) not in inside:
                yield node.id, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno


def _comprehension_targets(node: ast.AST, source: Source) -> Iterator[str]:
    for parent in source.parents_of(node):
        if isinstance(parent, _COMPREHENSIONS):
            for one in parent.generators:
                for target in ast.walk(one.target):
                    if isinstance(target, ast.Name):
                        yield target.id
        if isinstance(parent, Function):
            return


def guess(name: str, function: Function) -> str:
    """What the source says of a value: the annotation, or the display that is assigned."""
    for argument in arguments_of(function):
        if argument.arg == name and argument.annotation is not None:
            return ast.unparse(argument.annotation)
    for node in own_nodes(function):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return "function"
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            return kind_of(node.value)
    return ""


def kind_of(value: ast.expr) -> str:
    """What the source says of a value, "" if nothing."""
    match value:
        case ast.Constant():
            return type(value.value).__name__
        case ast.List() | ast.ListComp():
            return "list"
        case ast.Dict() | ast.DictComp():
            return "dict"
        case ast.Call(func=ast.Name(id=("len" | "int") as called)):
            return "int" if called else ""
        case _:
            return ""
