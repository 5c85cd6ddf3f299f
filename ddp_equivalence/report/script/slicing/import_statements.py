"""The import statements of a script."""

from __future__ import annotations

import ast
import keyword
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field


@dataclass
class ImportStatements:
    """``modules``: pairs of a module and its name in the script. ``names``: for each module, pairs
    of a name in it and its name in the script.
    """

    modules: set[tuple[str, str]] = field(default_factory=set)
    names: dict[str, set[tuple[str, str]]] = field(default_factory=dict)

    def blocks(self) -> list[str]:
        """The source in two blocks: first the imports of Python's own modules, then all others."""
        statements: list[tuple[str, str]] = []
        names = {module: set(pairs) for module, pairs in self.names.items()}
        for module, output in self.modules:
            parent, _, last = module.rpartition(".")
            if output == module.split(".")[0]:
                statements.append((module, f"import {module}"))
            elif last == output:
                names.setdefault(parent, set()).add((last, output))
            else:
                statements.append((module, f"import {module} as {output}"))
        for module, pairs in names.items():
            listed = [
                name if name == output else f"{name} as {output}" for name, output in sorted(pairs)
            ]
            statements.append((module, f"from {module} import {', '.join(listed)}"))
        standard = {line for line in statements if line[0].split(".")[0] in sys.stdlib_module_names}
        groups = (standard, set(statements) - standard)
        blocks = ["\n".join(line for _, line in sorted(group, key=_order)) for group in groups]
        return [block for block in blocks if block]


def _order(statement: tuple[str, str]) -> tuple[bool, str]:
    module, line = statement
    return line.startswith("from"), module


# Choose a name in the script for everything that it contains, so that no two are the same.

Key = tuple[str, str]
"""What a name stands for: most often a file and the name there."""


class OutputNames:
    """The names of the script, by what they stand for."""

    def __init__(self) -> None:
        self._chosen: dict[Key, str] = {}
        self._taken: set[str] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._chosen

    def __getitem__(self, key: Key) -> str:
        return self._chosen[key]

    def once(self, key: Key, choose: Callable[[], str]) -> str:
        """The name that was chosen for ``key``; ``choose`` is called the first time only."""
        if key not in self._chosen:
            self._chosen[key] = choose()
        return self._chosen[key]

    def reserve(self, name: str) -> str:
        """Take this name, whether it is free or not."""
        self._taken.add(name)
        return name

    def free(self, *wanted: str) -> str:
        """The first of the wanted names that is free, or the last of them with a number."""
        taken = {*self._taken, *keyword.kwlist}
        numbered = (f"{wanted[-1]}_{number}" for number in range(2, 1000))
        return self.reserve(next(name for name in (*wanted, *numbered) if name not in taken))


# Find the names that a piece of source uses but does not bind, by the scopes of Python.

Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True)
class FreeName:
    """One use of a name that no scope of the piece binds.

    ``attributes``: in ``a.b.c``, the nodes ``a.b`` and ``a.b.c``. ``local_names``: the names that
    the scopes around this place bind. ``in_signature``: the name is part of an annotation in the
    signature of a function.
    """

    node: ast.Name
    attributes: tuple[ast.Attribute, ...]
    local_names: frozenset[str]
    in_signature: bool

    @property
    def name(self) -> str:
        return self.node.id


@dataclass
class Scopes:
    """The free names of a piece of source in order of appearance, and what else an edit needs.

    ``functions``: every function in the piece. ``declarations``: its ``global`` and ``nonlocal``
    statements. ``local_imports``: imports inside functions. ``local_annotations``: annotated
    assignments in functions, whose annotations Python never evaluates.
    """

    free_names: list[FreeName] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    declarations: list[ast.Global | ast.Nonlocal] = field(default_factory=list)
    local_imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    local_annotations: list[ast.AnnAssign] = field(default_factory=list)


def scopes_of(piece: ast.AST, skip: Iterable[ast.AST] = ()) -> Scopes:
    """Analyse a statement, function or lambda, except for the nodes in ``skip``."""
    visitor = _Visitor(set(map(id, skip)))
    visitor.visit(piece)
    return visitor.result


def bound_names(statement: ast.stmt) -> set[str]:
    """The names that a statement binds in its own scope."""
    return set(_bound([statement]))


def parameters(arguments: ast.arguments) -> list[ast.arg]:
    """All parameters of a function."""
    starred = [arg for arg in (arguments.vararg, arguments.kwarg) if arg is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, Comprehension | ast.Lambda):
            walruses = (inner for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr))
            yield from (walrus.target.id for walrus in walruses)
        else:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                yield node.id
            for attribute in ("name", "rest"):  # of except handlers and match patterns
                if isinstance(getattr(node, attribute, None), str):
                    yield getattr(node, attribute)
            yield from _bound(ast.iter_child_nodes(node))


@dataclass
class _Scope:
    names: set[str]
    is_class: bool = False


class _Visitor(ast.NodeVisitor):
    def __init__(self, skip: set[int]) -> None:
        self.result = Scopes()
        self._skip = skip
        self._scopes: list[_Scope] = []
        self._in_signature = False

    def visit(self, node: ast.AST) -> None:
        if id(node) not in self._skip:
            super().visit(node)

    def visit_FunctionDef(self, node: Function) -> None:
        self.result.functions.append(node)
        self._visit_all([*node.decorator_list, *node.args.defaults, *node.args.kw_defaults])
        self._in_signature, before = True, self._in_signature
        annotations = [parameter.annotation for parameter in parameters(node.args)]
        self._visit_all([*annotations, node.returns])
        self._in_signature = before
        self._visit_body(node.args, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  # ast's own name

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_all([*node.args.defaults, *node.args.kw_defaults])
        self._visit_body(node.args, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        self._scopes.append(_Scope(set(_bound(node.body)), is_class=True))
        self._visit_all(node.body)
        self._scopes.pop()

    def _visit_comprehension(self, node: Comprehension) -> None:
        # The first iterable is evaluated in the scope around the comprehension.
        first, *_ = node.generators
        self.visit(first.iter)
        self._scopes.append(_Scope(set(_bound(part.target for part in node.generators))))
        self._skip.add(id(first.iter))
        self.generic_visit(node)
        self._scopes.pop()

    visit_ListComp = visit_SetComp = _visit_comprehension  # noqa: N815
    visit_DictComp = visit_GeneratorExp = _visit_comprehension  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all([node.target, node.value])
        if self._scopes and not self._scopes[-1].is_class:
            self.result.local_annotations.append(node)
        else:
            self.visit(node.annotation)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain: list[ast.Attribute] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            chain.append(inner)
            inner = inner.value
        if isinstance(inner, ast.Name):
            self._use(inner, tuple(reversed(chain)))
        else:
            self.visit(inner)

    def visit_Name(self, node: ast.Name) -> None:
        self._use(node, ())

    def visit_Global(self, node: ast.Global) -> None:
        self.result.declarations.append(node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.result.declarations.append(node)

    def visit_Import(self, node: ast.Import) -> None:
        if self._scopes:
            self.result.local_imports.append(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if self._scopes:
            self.result.local_imports.append(node)

    def _use(self, node: ast.Name, attributes: tuple[ast.Attribute, ...]) -> None:
        # The body of a class sees the names it binds, but the methods do not.
        visible = [scope for scope in self._scopes[:-1] if not scope.is_class] + self._scopes[-1:]
        names = frozenset(name for scope in visible for name in scope.names)
        if node.id not in names:
            self.result.free_names.append(FreeName(node, attributes, names, self._in_signature))

    def _visit_body(self, arguments: ast.arguments, body: Iterable[ast.AST]) -> None:
        body = list(body)
        names = {parameter.arg for parameter in parameters(arguments)} | set(_bound(body))
        declared = {
            name
            for part in body
            for node in ast.walk(part)
            if isinstance(node, ast.Global | ast.Nonlocal)
            for name in node.names
        }
        self._scopes.append(_Scope(names - declared))
        self._visit_all(body)
        self._scopes.pop()

    def _visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)
