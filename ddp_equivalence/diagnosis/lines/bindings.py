"""What the user's code gives a name, an attribute or a call: the expressions that have run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from torch import Tensor

from ddp_equivalence.diagnosis.lines.arguments import argument_given, name_in_calls
from ddp_equivalence.diagnosis.lines.made_from import FILLING
from ddp_equivalence.diagnosis.lines.run_lines import RunLines
from ddp_equivalence.diagnosis.lines.source_tree import (
    FUNCTIONS,
    Function,
    Place,
    called_name,
    inside,
    place_of,
    tree_of,
)

GOING_THROUGH = ("__iter__", "__getitem__", "__getitems__", "__next__", "__call__")
"""The methods by which an object gives what it holds."""

SEEDING = frozenset({"manual_seed", "seed"})
"""The methods that decide which random numbers an object gives."""

MOST_CALLS = 4
"""A function that is called at more places is not followed to its callers."""

Bound = tuple[Place, ast.expr]
"""An expression, and where it stands."""


@dataclass(frozen=True)
class Bindings:
    """Looks names up in the source of what has run. A name may have been given several things."""

    run: RunLines

    @cached_property
    def _ran(self) -> frozenset[tuple[str, int]]:
        return frozenset((line.file, line.number) for line in self.run.times)

    def has_run(self, place: Place | None) -> bool:
        """True if the statement has begun, or runs when the file is imported."""
        if place is None or place.function is None:
            return place is not None
        statement = place.statement
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        body = getattr(statement, "body", None)
        if isinstance(body, list) and body:
            last = max(first, body[0].lineno - 1)
        return any((place.file, number) in self._ran for number in range(first, last + 1))

    def of_name(self, place: Place, name: str) -> list[Bound]:
        """What a variable was given, in its function or around it, or what its callers gave."""
        function = place.function
        while function is not None:
            found = list(self._set_in(place, inside(function), name))
            if found:
                return found
            if name in _arguments(function):
                return list(self._given(place, function, name))
            function = _enclosing(place.file, function.name, function.lineno)
            place = replace(place, function=function)
        tree = tree_of(place.file)
        return list(self._set_in(place, iter(tree.body), name)) if tree is not None else []

    def of_attribute(self, node: ast.Attribute) -> list[Bound]:
        """What an attribute of this name was set to, in any object, or what its property gives."""
        is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
        if hasattr(Tensor, node.attr) and not is_own:
            return []
        found = [one for file in self.run.files for one in self._attribute_in(file, node.attr)]
        return found or [
            one for file in self.run.files for one in self._returned(file, node.attr, None)
        ]

    def of_call(self, node: ast.Call) -> list[Bound]:
        """What a function of the user's has returned or yielded, or what an object of it gives."""
        name = called_name(node)
        return [
            one
            for file in self.run.files
            for one in (
                *self._returned(file, name, None),
                *(
                    part
                    for owner in _classes(file)
                    if owner.name == name
                    for method in GOING_THROUGH
                    for part in self._returned(file, method, owner)
                ),
            )
        ]

    def _set_in(self, place: Place, nodes: Iterator[ast.AST], name: str) -> Iterator[Bound]:
        for node in nodes:
            for target, value in _pairs(node):
                if _is_set(target, name):
                    at = place_of(place.file, value.lineno)
                    if at is not None and self.has_run(at):
                        yield at, _matching(target, value, name)

    def _given(self, place: Place, function: Function, name: str) -> Iterator[Bound]:
        called = name_in_calls(place.file, function)
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        calls = [(at, call) for at, call in self.calls() if called_name(call) == called]
        for at, call in calls if len(calls) <= MOST_CALLS else ():
            value = argument_given(call, names, name, called != function.name)
            if value is not None:
                yield at, value

    def calls(self) -> Iterator[tuple[Place, ast.Call]]:
        """All calls in the user's code that have run."""
        for file in self.run.files:
            yield from self._calls(file)

    def _calls(self, file: str) -> Iterator[tuple[Place, ast.Call]]:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Call):
                at = place_of(file, node.lineno)
                if at is not None and self.has_run(at):
                    yield at, node

    def _attribute_in(self, file: str, name: str) -> Iterator[Bound]:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            for target, value in _pairs(node):
                parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
                if any(isinstance(one, ast.Attribute) and one.attr == name for one in parts):
                    at = place_of(file, value.lineno)
                    if at is not None and self.has_run(at):
                        yield at, value
        for owner in _classes(file):
            yield from self._field_of(file, owner, name)

    def _field_of(self, file: str, owner: ast.ClassDef, name: str) -> Iterator[Bound]:
        """What the field of a dataclass was given, also where it has a value of its own."""
        fields = [one for one in owner.body if isinstance(one, ast.AnnAssign)]
        names = [one.target.id if isinstance(one.target, ast.Name) else "" for one in fields]
        if name not in names:
            return
        value = fields[names.index(name)].value
        for at, call in self._calls(file):
            inside_it = owner.lineno <= call.lineno <= (owner.end_lineno or 0)
            if called_name(call) == owner.name or (called_name(call) == "cls" and inside_it):
                argument = argument_given(call, ["self", *names], name, constructs=True)
                if argument is not None:
                    yield at, argument
        default = place_of(file, value.lineno) if value is not None else None
        if default is not None and value is not None:
            yield default, value

    def _returned(self, file: str, name: str, owner: ast.ClassDef | None) -> Iterator[Bound]:
        tree = tree_of(file)
        body = owner.body if owner is not None else ast.walk(tree) if tree is not None else ()
        for function in body:
            if not isinstance(function, FUNCTIONS) or function.name != name:
                continue
            for node in inside(function):
                if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) and node.value:
                    at = place_of(file, node.value.lineno)
                    if at is not None and self.has_run(at):
                        yield at, node.value


def _arguments(function: Function) -> list[str]:
    given_by = function.args
    return [one.arg for one in (*given_by.posonlyargs, *given_by.args, *given_by.kwonlyargs)]


@lru_cache(maxsize=256)
def _enclosing(file: str, name: str, number: int) -> Function | None:
    """The function around another one; None if there is none."""
    tree = tree_of(file)
    around = [
        one
        for one in (ast.walk(tree) if tree is not None else ())
        if isinstance(one, FUNCTIONS)
        and one.lineno < number <= (one.end_lineno or 0)
        and (one.name, one.lineno) != (name, number)
    ]
    return max(around, key=lambda one: one.lineno, default=None)


@lru_cache(maxsize=64)
def _classes(file: str) -> tuple[ast.ClassDef, ...]:
    tree = tree_of(file)
    nodes = ast.walk(tree) if tree is not None else ()
    return tuple(one for one in nodes if isinstance(one, ast.ClassDef))


def _pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a node of the syntax tree sets, and to what."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
        if node.value is not None:
            yield node.target, node.value
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield node.target, node.iter
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            if item.optional_vars is not None:
                yield item.optional_vars, item.context_expr
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if isinstance(function, ast.Attribute) and function.attr in FILLING | SEEDING:
            yield from ((function.value, one) for one in node.value.args)


def _is_set(target: ast.expr, name: str) -> bool:
    while isinstance(target, (ast.Subscript, ast.Starred)):
        target = target.value
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(_is_set(one, name) for one in target.elts)
    return isinstance(target, ast.Name) and target.id == name


def _matching(target: ast.expr, value: ast.expr, name: str) -> ast.expr:
    """The part of a value that a name gets, where several names get one each."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, part in zip(target.elts, value.elts, strict=False):
            if _is_set(one, name):
                return part
    return value
