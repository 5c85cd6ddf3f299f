"""A user's file as a syntax tree, and the names, functions and imports that its code can use."""

from __future__ import annotations

import ast
import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

Node = TypeVar("Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Values = Mapping[int, Mapping[str, str]]
"""The first line of a function, a name, and a text that describes its value, such as "int"."""

# Attributes of tensors, modules and ranks that are no tensors.
NUMBERS_OF_A_RANK = {"rank", "local_rank", "node", "world_size", "local_world_size", "nodes"}
NUMBERS = NUMBERS_OF_A_RANK | {
    *("shape", "dtype", "device", "ndim", "training", "requires_grad", "is_sparse"),
}

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class SourceFile:
    """One file, with facts about it that are computed when an edit first asks for them."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.tree = ast.parse(text.removeprefix("\ufeff"))  # a byte order mark
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, from the inside, without the module."""
        while not isinstance(node := self.parents[node], ast.Module):
            yield node

    def nearest(self, node: ast.AST, *kinds: type[Node]) -> Node | None:
        """The innermost node of these kinds around a node."""
        return next((one for one in self.around(node) if isinstance(one, kinds)), None)

    def top(self, node: ast.AST) -> ast.stmt:
        """The statement of the module in which a node stands."""
        (*_, last) = (node, *self.around(node))
        assert isinstance(last, ast.stmt)
        return last

    def from_here_on(self, statement: ast.AST) -> list[ast.AST]:
        """A statement and those that follow it in its block."""
        for _, block in ast.iter_fields(self.parents[statement]):
            if isinstance(block, list) and any(one is statement for one in block):
                return block[next(i for i, one in enumerate(block) if one is statement) :]
        return [statement]

    def replaced(self, old: Sequence[ast.AST], new: Sequence[ast.AST], whole: ast.AST) -> Any:
        """``whole`` with other nodes in place of neighbours in it. It shares every part that stays.

        The one it replaces is not changed.
        """
        while old[0] is not whole:
            around = self.parents[old[0]]
            other = copy.copy(around)
            for name, value in ast.iter_fields(around):
                if value is old[0]:
                    setattr(other, name, new[0])
                elif isinstance(value, list):
                    start = next((i for i, one in enumerate(value) if one is old[0]), None)
                    if start is not None:
                        setattr(other, name, [*value[:start], *new, *value[start + len(old) :]])
            old, new = [around], [other]
        return new[0]

    @cached_property
    def modules(self) -> dict[str, str]:
        """The modules and functions that the file imports, by the names that it gives them."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for one in node.names:
                    whole = one.name if one.asname else one.name.split(".")[0]
                    found[one.asname or whole] = whole
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        return found

    def imported_as(self, name: str) -> str | None:
        """How the file can write something of torch, such as "torch.distributed.all_reduce".

        What the file has imported is used, and nothing is imported in addition: a reader copies
        the edit as it stands.
        """
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            for alias, whole in self.modules.items():
                if whole == ".".join(parts[:length]):
                    return ".".join([alias, *parts[length:]])
        return None

    @cached_property
    def attributes(self) -> dict[str, list[str]]:
        """The attributes that the file reads or sets on an expression, and does not call.

        Those of ``self`` have the name of their class before them, as in ``Trainer.self``.
        """
        found: dict[str, dict[str, None]] = defaultdict(dict)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and not is_called(node, self.parents[node]):
                found[self.owner(node.value)][node.attr] = None
        return {owner: list(names) for owner, names in found.items()}

    @cached_property
    def fields(self) -> list[list[str]]:
        """The annotated fields of each class."""
        classes = (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))
        return [
            [ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)]
            for node in classes
        ]

    def owner(self, node: ast.expr) -> str:
        """A name for the object that an expression stands for."""
        text = ast.unparse(node)
        first, dot, rest = text.partition(".")
        return f"{self.owner_of_self(node)}{dot}{rest}" if first == "self" else text

    def owner_of_self(self, node: ast.AST) -> str:
        """A name for what ``self`` is at a node."""
        around = self.nearest(node, ast.ClassDef)
        return f"{around.name if around else ''}.self"


def is_called(node: ast.AST, parent: ast.AST) -> bool:
    """True for the ``f`` of ``f(x)``."""
    return isinstance(parent, ast.Call) and parent.func is node


def parameters_of(function: Function) -> list[str]:
    """The names of all parameters of a function."""
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [one.arg for one in (*listed, arguments.vararg, arguments.kwarg) if one is not None]


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, Function | ast.ClassDef):
            yield from own_nodes(child)


def first_line(statement: ast.AST) -> int:
    """The line of a statement, or of its first decorator."""
    decorators = getattr(statement, "decorator_list", [])
    return min(int(one.lineno) for one in (statement, *decorators))


def likeness(one: str, other: str) -> int:
    """How many words two names share, and whether one is part of the other."""
    one, other = one.casefold(), other.casefold()
    words = set(one.split("_")) & set(other.split("_")) - {""}
    return 2 * len(words) + (one in other or other in one)


class Scope:
    """The names that a node can use, with what a run has shown of their values.

    function: the innermost one around the node
    values: every name, and attribute such as ``self.count``, with the description of its value, ""
    where nothing is known
    bound: the line from which on a name has a value
    """

    def __init__(self, node: ast.AST, source: SourceFile, values: Values) -> None:
        around = [one for one in source.around(node) if isinstance(one, Function)]
        self.function = around[0]
        self.parameters = [name for one in around for name in parameters_of(one)]
        self.values: dict[str, str] = {}
        self.bound: dict[str, int] = {}
        for function in reversed(around):
            seen = values.get(first_line(function), {})
            for name, line in _bound_in(function):
                self.bound.setdefault(name, line if function is around[0] else 0)
                self.values[name] = seen.get(name, "")
            self.values |= {name: text for name, text in seen.items() if "." in name}
        for parent in source.around(node):
            if isinstance(parent, _COMPREHENSIONS):
                self.values |= dict.fromkeys(_targets(parent), "")

    def describes(self, text: str, *types: str) -> bool:
        """False where the run has shown that a name has a value of none of these types."""
        known = self.values.get(text, "")
        return not known or known.casefold().startswith(types)

    def names_before(self, line: int, like: str) -> list[str]:
        """The names that have values at a line, those most like another name first."""
        names = [
            name
            for name in self.values
            if "." not in name
            and name not in ("self", "cls", "ctx", "_")
            and self.bound.get(name, 0) < line
        ]
        return sorted(names, key=lambda name: (-likeness(like, name), -self.bound.get(name, 0)))


def _bound_in(function: Function) -> Iterator[tuple[str, int]]:
    for name in parameters_of(function):
        yield name, 0
    nodes = list(own_nodes(function))
    inside = {name for one in nodes if isinstance(one, _COMPREHENSIONS) for name in _targets(one)}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id not in inside:
            yield node.id, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno


def _targets(comprehension: ast.AST) -> list[str]:
    generators = getattr(comprehension, "generators", [])
    targets = (node for one in generators for node in ast.walk(one.target))
    return [node.id for node in targets if isinstance(node, ast.Name)]


@dataclass(frozen=True)
class Site:
    """A node that may be edited, in its file, with the names that it can use."""

    node: ast.AST
    source: SourceFile
    scope: Scope

    @property
    def parent(self) -> ast.AST:
        """The node directly around the node."""
        return self.source.parents[self.node]

    @property
    def line(self) -> int:
        """The line on which the statement around the node begins."""
        statement = self.node
        while not isinstance(statement, ast.stmt):
            statement = self.source.parents[statement]
        return statement.lineno

    def is_called(self, node: ast.AST) -> bool:
        """True for the ``f`` of ``f(x)``."""
        return is_called(node, self.source.parents[node])

    def is_of_a_module(self, node: ast.AST) -> bool:
        """True for a module that the file imports, and for anything that is taken from one."""
        return ast.unparse(node).split(".")[0] in self.source.modules

    def may_be_tensor(self, node: ast.AST) -> bool:
        """False where the source, or the run, shows that a value is no tensor.

        Calls and operations have no description, and may be tensors.
        """
        match node:
            case ast.Name(id=name):
                return name in self.scope.values and self.scope.describes(name, "tensor")
            case ast.Attribute(attr=name):
                is_described = self.scope.describes(ast.unparse(node), "tensor")
                return is_described and name not in NUMBERS and not self.is_of_a_module(node)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.may_be_tensor(operand)
        return isinstance(node, ast.Call | ast.BinOp | ast.Subscript | ast.Tuple)

    @property
    def world_size(self) -> str | None:
        """How the world size can be written here, with what the file has imported.

        Only if it imports nothing for that, a rank that the function is given is asked.
        """
        called = self.source.imported_as("torch.distributed.get_world_size")
        return f"{called}()" if called else self._of_rank("world_size")

    def _of_rank(self, number: str) -> str | None:
        attributes = self.source.attributes
        if "rank" in self.scope.parameters and "rank" in attributes:
            return f"rank.{number}" if self.scope.describes("rank", "rank") else None
        own = self.source.owner_of_self(self.node)
        if f"{own}.rank" in attributes:
            return f"self.rank.{number}"
        return f"self.{number}" if number in attributes.get(own, []) else None

    def is_bound_elsewhere(self, name: str) -> bool:
        """True if a name of the function has a value without the node."""
        inside = set(map(id, ast.walk(self.node)))
        return name in self.scope.parameters or any(
            isinstance(one, ast.Name)
            and one.id == name
            and isinstance(one.ctx, ast.Store)
            and id(one) not in inside
            for one in ast.walk(self.scope.function)
        )
