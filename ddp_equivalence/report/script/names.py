"""Which names of its module a piece of source uses, and where: scopes are Python's own."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True)
class Use:
    """A name that no function around it binds.

    ``attributes``: of ``a.b.c`` the nodes ``a.b`` and ``a.b.c``. ``hidden``: names that would mean
    something else in this place. ``annotation``: the use is in the signature of a function.
    """

    node: ast.Name
    attributes: tuple[ast.Attribute, ...]
    hidden: frozenset[str]
    annotation: bool

    @property
    def name(self) -> str:
        return self.node.id


@dataclass
class Found:
    """``uses`` in order of appearance; ``signatures``: every function in the piece;
    ``declared``: its ``global`` and ``nonlocal`` statements; ``imports``: those inside functions;
    ``local_types``: annotations of variables in functions, which Python never looks at.
    """

    uses: list[Use] = field(default_factory=list)
    signatures: list[Function] = field(default_factory=list)
    declared: list[ast.Global | ast.Nonlocal] = field(default_factory=list)
    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    local_types: list[ast.AnnAssign] = field(default_factory=list)


def find(piece: ast.AST, skip: Iterable[ast.AST] = ()) -> Found:
    """All uses in a statement, function or lambda, but for the nodes in ``skip``."""
    visitor = _Scopes(set(map(id, skip)))
    visitor.visit(piece)
    return visitor.found


def bound_by(statement: ast.stmt) -> set[str]:
    """The names that a statement binds in its own scope."""
    return set(_bound([statement]))


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((one.asname or one.name).split(".")[0] for one in node.names)
        elif isinstance(node, Comprehension | ast.Lambda):
            inside = (one for one in ast.walk(node) if isinstance(one, ast.NamedExpr))
            yield from (one.target.id for one in inside)
        else:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                yield node.id
            for named in ("name", "rest"):  # of except handlers and patterns
                if isinstance(getattr(node, named, None), str):
                    yield getattr(node, named)
            yield from _bound(ast.iter_child_nodes(node))


@dataclass
class _Scope:
    names: set[str]
    is_class: bool = False


class _Scopes(ast.NodeVisitor):
    def __init__(self, skip: set[int]) -> None:
        self.found = Found()
        self._skip = skip
        self._scopes: list[_Scope] = []
        self._in_signature = False

    def visit(self, node: ast.AST) -> None:
        if id(node) not in self._skip:
            super().visit(node)

    def visit_FunctionDef(self, node: Function) -> None:
        self.found.signatures.append(node)
        self._each([*node.decorator_list, *node.args.defaults, *node.args.kw_defaults])
        self._in_signature, before = True, self._in_signature
        self._each([*(one.annotation for one in arguments(node.args)), node.returns])
        self._in_signature = before
        self._inside(node.args, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  # ast's own name

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._each([*node.args.defaults, *node.args.kw_defaults])
        self._inside(node.args, [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._each([*node.decorator_list, *node.bases, *node.keywords])
        self._scopes.append(_Scope(set(_bound(node.body)), is_class=True))
        self._each(node.body)
        self._scopes.pop()

    def _comprehension(self, node: Comprehension) -> None:
        first, *_ = node.generators
        self.visit(first.iter)
        targets = set(_bound(one.target for one in node.generators))
        self._scopes.append(_Scope(targets))
        self._skip.add(id(first.iter))
        self.generic_visit(node)
        self._scopes.pop()

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._each([node.target, node.value])
        if self._scopes and not self._scopes[-1].is_class:
            self.found.local_types.append(node)
        else:
            self.visit(node.annotation)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain: list[ast.Attribute] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            chain.append(inner)
            inner = inner.value
        if isinstance(inner, ast.Name):
            self._name(inner, tuple(reversed(chain)))
        else:
            self.visit(inner)

    def visit_Name(self, node: ast.Name) -> None:
        self._name(node, ())

    def visit_Global(self, node: ast.Global) -> None:
        self.found.declared.append(node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.found.declared.append(node)

    def visit_Import(self, node: ast.Import) -> None:
        if self._scopes:
            self.found.imports.append(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if self._scopes:
            self.found.imports.append(node)

    def _name(self, node: ast.Name, attributes: tuple[ast.Attribute, ...]) -> None:
        # Names of a class body are seen in it, but not in its methods.
        around = [one for one in self._scopes[:-1] if not one.is_class] + self._scopes[-1:]
        hidden = frozenset().union(*(one.names for one in around)) if around else frozenset()
        if node.id not in hidden:
            self.found.uses.append(Use(node, attributes, hidden, self._in_signature))

    def _inside(self, own: ast.arguments, body: Iterable[ast.AST]) -> None:
        body = list(body)
        names = {one.arg for one in arguments(own)} | set(_bound(body))
        declared = {
            name
            for part in body
            for one in ast.walk(part)
            if isinstance(one, ast.Global | ast.Nonlocal)
            for name in one.names
        }
        self._scopes.append(_Scope(names - declared))
        self._each(body)
        self._scopes.pop()

    def _each(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)


def arguments(own: ast.arguments) -> list[ast.arg]:
    """All parameters of a function."""
    more = [one for one in (own.vararg, own.kwarg) if one is not None]
    return [*own.posonlyargs, *own.args, *own.kwonlyargs, *more]
