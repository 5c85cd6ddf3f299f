"""The one reader of the user's source: what stands around a line, what ran, and what names got."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import takewhile

from torch import Tensor

from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
RETURNS = (ast.Return, ast.Yield, ast.YieldFrom)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

WITHOUT_CODE = (ast.AnnAssign, ast.Global, ast.Nonlocal)
"""Statements that may leave no code, so that no line of theirs ever runs."""

# A line in the syntax tree of its file.


@dataclass(frozen=True)
class Around:
    """A statement around a line. ``branch``: the name of its part that holds the line, such as
    ``body`` or ``orelse``.
    """

    statement: ast.stmt
    branch: str


@dataclass(frozen=True)
class SourceLine:
    """Where a line stands. ``statement``: the innermost one that holds it. ``around``: what is
    around this in the same function, the innermost first. ``function``: None outside of functions.
    """

    file: str
    function: Function | None
    statement: ast.stmt
    around: tuple[Around, ...]

    def line(self, node: ast.AST) -> CodeLine:
        """The line at which a part of this function begins."""
        name = self.function.name if self.function is not None else "<module>"
        return CodeLine(self.file, getattr(node, "lineno", 0), name)

    @property
    def nodes(self) -> list[ast.AST]:
        """The statement, and everything in it that belongs to the same function."""
        return [self.statement, *inside(self.statement)]

    @property
    def value(self) -> ast.expr | None:
        """What the statement assigns, returns or evaluates; None if it does nothing of this."""
        value = getattr(self.statement, "value", None)
        return value if isinstance(value, ast.expr) else None

    @property
    def conditions(self) -> list[ast.If]:
        """The conditions around the line, the innermost first."""
        return [one.statement for one in self.around if isinstance(one.statement, ast.If)]

    @property
    def loops(self) -> list[Loop]:
        """The loops whose bodies hold the line, the innermost first."""
        return [
            one.statement
            for one in self.around
            if isinstance(one.statement, LOOPS) and one.branch == "body"
        ]


@lru_cache(maxsize=64)
def tree_of(file: str) -> ast.Module | None:
    """The syntax tree of a file; None if it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


@lru_cache(maxsize=64)
def nodes_in(file: str) -> tuple[ast.AST, ...]:
    """All nodes of the syntax tree of a file; () if it cannot be read."""
    tree = tree_of(file)
    return () if tree is None else tuple(ast.walk(tree))


def place_at(line: CodeLine) -> SourceLine | None:
    """Where a line stands; None if the file cannot be read, or if no statement holds the line."""
    return place_of(line.file, line.number)


@lru_cache(maxsize=4096)
def place_of(file: str, number: int) -> SourceLine | None:
    """Where the line with this number stands; None as in ``place_at``."""
    tree = tree_of(file)
    if tree is None:
        return None
    function: Function | None = None
    around: list[Around] = []
    statement: ast.stmt | None = None
    found = _holding(tree, number)
    while found is not None:
        branch, inner = found
        if statement is not None:
            around.append(Around(statement, branch))
        if isinstance(statement, FUNCTIONS):
            function, around = statement, []
        statement = inner
        found = _holding(inner, number)
    if statement is None or isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return None
    return SourceLine(file, function, statement, tuple(reversed(around)))


def _holding(node: ast.AST, number: int) -> tuple[str, ast.stmt] | None:
    """The part of a node, and the statement in it, that hold a line."""
    for branch, value in ast.iter_fields(node):
        for one in value if isinstance(value, list) else ():
            if isinstance(one, ast.stmt) and holds(one, number):
                return branch, one
            if isinstance(one, (ast.ExceptHandler, ast.match_case)):
                inner = _holding(one, number)
                if inner is not None:
                    return branch, inner[1]
    return None


def holds(node: ast.stmt | ast.expr, number: int) -> bool:
    """True if a line is one of those that a node goes over."""
    return node.lineno <= number <= (node.end_lineno or node.lineno)


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """Everything in a statement that belongs to the same function."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield child
            yield from inside(child)


def leaving(loop: Loop) -> Iterator[ast.stmt]:
    """The statements that leave a loop before it is through."""
    yield from (one for one in inside(loop) if isinstance(one, ast.Return))
    yield from _of_this_loop(loop.body, ast.Break)


def skipping(loop: Loop) -> Iterator[ast.stmt]:
    """The statements that go on with the next pass of a loop."""
    yield from _of_this_loop(loop.body, ast.Continue)


def _of_this_loop(body: Sequence[ast.AST], kind: type[ast.stmt]) -> Iterator[ast.stmt]:
    for one in body:
        if isinstance(one, kind):
            yield one
        elif not isinstance(one, (*LOOPS, *FUNCTIONS, ast.ClassDef, ast.expr)):
            yield from _of_this_loop(list(ast.iter_child_nodes(one)), kind)


def called_name(call: ast.Call) -> str:
    """The last part of the name of what is called; "" if it has none."""
    return last_name(call.func)


def last_name(expression: ast.AST) -> str:
    """The name of a variable, or of the attribute at the end; "" for anything else."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def functions_named(file: str, name: str) -> list[Function]:
    """The functions and methods of this name in a file."""
    return [one for one in nodes_in(file) if isinstance(one, FUNCTIONS) and one.name == name]


def classes_in(file: str) -> list[ast.ClassDef]:
    """All classes in a file."""
    return [one for one in nodes_in(file) if isinstance(one, ast.ClassDef)]


def is_in_class(line: CodeLine, name: str) -> bool:
    """True for a line that stands in a class of this name."""
    return any(one.name == name and holds(one, line.number) for one in classes_in(line.file))


def arguments_of(function: Function, keyword_only: bool = True) -> list[str]:
    """The names of a function's arguments, without those with stars."""
    of = function.args
    more = of.kwonlyargs if keyword_only else []
    return [one.arg for one in (*of.posonlyargs, *of.args, *more)]


def line_in_function(file: str, number: int) -> CodeLine | None:
    """The line with the name of the function that it stands in; None if the file is not read."""
    place = place_of(file, number)
    return None if place is None else replace(place.line(place.statement), number=number)


# Which lines of the user's code a rank has run, how often, and in which order.


@dataclass(frozen=True)
class RunLines:
    """``times``: each line that has run -> how often it began, in all steps. ``last``: -> a number
    that says in which order they ran last. ``backwards``: the lines that called backward.
    """

    times: Mapping[CodeLine, int]
    last: Mapping[CodeLine, int]
    backwards: tuple[CodeLine, ...] = ()

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The files of the user's code that ran."""
        return tuple(dict.fromkeys(line.file for line in self.times))

    @cached_property
    def _numbers(self) -> frozenset[tuple[str, int]]:
        return frozenset((line.file, line.number) for line in self.times)

    def nodes(self) -> Iterator[tuple[str, ast.AST]]:
        """The nodes of the syntax trees of all files that ran, with their files."""
        return ((file, node) for file in self.files for node in nodes_in(file))

    def lines_with(self, number: Callable[[ast.AST], int | None]) -> list[CodeLine]:
        """The lines that have run among those whose numbers are given for nodes; each once."""
        found: dict[CodeLine, None] = {}
        for file, node in self.nodes():
            at = number(node)
            line = line_in_function(file, at) if at is not None else None
            if line is not None and self.times.get(line):
                found[line] = None
        return list(found)

    @property
    def begun(self) -> int:
        """When the last call of backward began."""
        return max((self.last.get(at, 0) for at in self.backwards), default=0)

    def has_run(self, place: SourceLine | None) -> bool:
        """True if the statement has begun, or runs when the file is imported."""
        if place is None or place.function is None:
            return place is not None
        statement = place.statement
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        body = getattr(statement, "body", None)
        if isinstance(body, list) and body:
            last = max(first, body[0].lineno - 1)
        return any((place.file, number) in self._numbers for number in range(first, last + 1))

    def beside_backward(self, place: SourceLine) -> SourceLine:
        """The place without the statements around it that also hold a call of backward: these do
        not decide about single gradients.
        """
        numbers = [line.number for line in self.backwards if line.file == place.file]
        inner = takewhile(
            lambda one: not any(holds(one.statement, number) for number in numbers), place.around
        )
        return replace(place, around=tuple(inner))

    def count(self, place: SourceLine, node: ast.AST) -> int:
        """How often the line began at which a part of this function begins."""
        return self.times.get(place.line(node), 0)

    def exact_count(self, place: SourceLine, node: ast.AST) -> int | None:
        """The same number; None for a line that may begin several times in one run of the node.

        Python comes back to the first line of a statement that goes over several lines, of a
        ``with`` at its end, and, from 3.12 on, in comprehensions.
        """
        parts = [node.test] if isinstance(node, (ast.If, ast.While)) else [node]
        if isinstance(node, (ast.For, ast.AsyncFor)):
            parts = [node.target, node.iter]
        for part in parts:
            end = getattr(part, "end_lineno", None)
            if end != getattr(node, "lineno", 0) or isinstance(part, (ast.With, ast.AsyncWith)):
                return None
            if any(isinstance(one, COMPREHENSIONS) for one in ast.walk(part)):
                return None
        return self.count(place, node)

    def last_of(self, place: SourceLine, body: Sequence[ast.stmt]) -> int:
        """When a line of a block of this function ran last; 0 if none has."""
        first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
        name = place.line(body[0]).function
        return max(
            (
                when
                for line, when in self.last.items()
                if line.file == place.file
                and line.function == name
                and first <= line.number <= last
            ),
            default=0,
        )

    def times_begun(self, place: SourceLine, body: Sequence[ast.stmt]) -> int | None:
        """How often a block of this function began; None if that is not certain."""
        first = body[0] if body else None
        while isinstance(first, (ast.With, ast.AsyncWith, ast.Try)):
            first = first.body[0]
        if first is None or isinstance(first, (*LOOPS, *WITHOUT_CODE)):
            return None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            return None
        return self.exact_count(place, first)


def run_lines(view: View, rank: int | None = None) -> RunLines:
    """The lines that a rank, or the lowest one, has run; none if they were not recorded."""
    seen = view.observed.by_rank.get(
        min(view.observed.by_rank, default=0) if rank is None else rank
    )
    if seen is None:
        return RunLines({}, {})
    backwards = tuple(place.line for place in view.observed.calls.backwards)
    return RunLines(seen.trace.times_run or {}, seen.trace.lines_run or {}, backwards)


# The statements that set a variable or an attribute, and the calls that give an argument.

FILLING = frozenset({"append", "extend", "insert", "update", "add", "copy_", "add_", "setdefault"})
"""Methods that change what they are called on."""

SEEDING = frozenset({"manual_seed", "seed"})
"""The methods that decide which random numbers an object gives."""


def settings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a node of the syntax tree sets or fills, and with what."""
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
    """True if a target is this variable, an element of it, or one of several with it."""
    while isinstance(target, (ast.Subscript, ast.Starred)):
        target = target.value
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(_is_set(one, name) for one in target.elts)
    return isinstance(target, ast.Name) and target.id == name


def _seeds(call: ast.expr) -> bool:
    return isinstance(call, ast.Call) and called_name(call) in SEEDING


def _is_attribute(target: ast.expr, name: str) -> bool:
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    return any(isinstance(one, ast.Attribute) and one.attr == name for one in parts)


def lines_that_set_variable(run: RunLines, place: SourceLine, name: str) -> list[CodeLine]:
    """The lines of this function that have run and set a variable of this name."""
    found: dict[CodeLine, None] = {}
    for node in inside(place.function) if place.function is not None else ():
        if isinstance(node, ast.stmt) and not isinstance(node, ast.Expr):
            stored = [one for target, _ in settings(node) for one in ast.walk(target)]
            names = [one for one in stored if isinstance(one, ast.Name) and one.id == name]
            line = place.line(node)
            if any(isinstance(one.ctx, ast.Store) for one in names) and run.times.get(line):
                found[line] = None
    return list(found)


def last_line_that_sets(
    run: RunLines, place: SourceLine, line: CodeLine, name: str
) -> CodeLine | None:
    """The last line above in the same function that has run and set or filled a variable."""
    statements = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)
    lines = [
        place.line(node)
        for node in (inside(place.function) if place.function is not None else ())
        if isinstance(node, statements)
        and node.lineno < line.number
        and any(_is_set(target, name) for target, _ in settings(node))
        and not (isinstance(node, ast.Expr) and _seeds(node.value))
    ]
    ran = [one for one in lines if run.times.get(one)]
    return max(ran, key=lambda one: one.number, default=None)


def lines_that_set_attribute(run: RunLines, name: str) -> list[CodeLine]:
    """The line that has run and set an attribute of this name, or gave it to a constructor.

    Empty if several different lines did.
    """
    found = run.lines_with(lambda node: _line_if_sets(node, name))
    return found if len(found) == 1 else []


def _line_if_sets(node: ast.AST, name: str) -> int | None:
    """The number of the line at which a node sets this attribute, or gives it to a constructor."""
    if isinstance(node, ast.Call):
        called = called_name(node)
        given = [one.value.lineno for one in node.keywords if one.arg == name]
        return given[0] if given and (called[:1].isupper() or called == "cls") else None
    if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return None
    return next(
        (target.lineno for target, _ in settings(node) if _is_attribute(target, name)), None
    )


def copied_attribute(run: RunLines, name: str) -> str:
    """The attribute to which the one of this name is set, before it is counted up or down.

    "" unless all lines that set it, other than to count, set it to this one.
    """
    copied = {
        value.attr if isinstance(value, ast.Attribute) else ""
        for file, node in run.nodes()
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Call))
        and (number := _line_if_sets(node, name)) is not None
        and run.times.get(line_in_function(file, number) or CodeLine("", 0, ""))
        for value in [getattr(node, "value", None)]
    }
    return copied.pop() if len(copied) == 1 else ""


def name_in_calls(file: str, function: Function) -> str:
    """The name by which a function is called: that of its class for a constructor."""
    if function.name == "__init__":
        return next((one.name for one in classes_in(file) if function in one.body), function.name)
    return function.name


def argument_given(
    call: ast.Call, names: Sequence[str], name: str, constructs: bool
) -> ast.expr | None:
    """The expression that a call gives for an argument; None if it does not say so plainly."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if name not in names or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    bound = isinstance(call.func, ast.Attribute) and names[0] in ("self", "cls")
    at = names.index(name) - (1 if bound or constructs else 0)
    return call.args[at] if 0 <= at < len(call.args) else None


def lines_that_call(run: RunLines, name: str) -> list[CodeLine]:
    """The lines that have run and call a function of this name."""
    return run.lines_with(
        lambda node: (
            node.lineno if isinstance(node, ast.Call) and called_name(node) == name else None
        )
    )


def returns_of(run: RunLines, file: str, name: str) -> Iterator[tuple[CodeLine, ast.expr | None]]:
    """The lines that have run and returned or yielded what a function of this name gives, and what.

    Only functions of the same file are known, and only those whose name none of the others has.
    """
    functions = functions_named(file, name) if name else []
    for node in inside(functions[0]) if len(functions) == 1 else ():
        line = CodeLine(file, getattr(node, "lineno", 0), name)
        if isinstance(node, RETURNS) and run.times.get(line):
            yield line, node.value


# All that the user's code gives a name, an attribute or a call: the expressions that have run.

GOING_THROUGH = ("__iter__", "__getitem__", "__getitems__", "__next__", "__call__")
"""The methods by which an object gives what it holds."""

MOST_CALLS = 4
"""A function that is called at more places is not followed to its callers."""

Bound = tuple[SourceLine, ast.expr]
"""An expression, and where it stands."""


@dataclass(frozen=True)
class Bindings:
    """Looks names up in the source of what has run. A name may have been given several things."""

    run: RunLines

    def of(self, place: SourceLine, node: ast.expr) -> list[Bound]:
        """What a name or an attribute was given, or what a call returned."""
        if isinstance(node, ast.Name):
            return self.of_name(place, node.id) if node.id != "self" else []
        if isinstance(node, ast.Attribute):
            return self.of_attribute(node)
        return self.of_call(node) if isinstance(node, ast.Call) else []

    def of_name(self, place: SourceLine, name: str) -> list[Bound]:
        """What a variable was given, in its function or around it, or what its callers gave."""
        function = place.function
        while function is not None:
            found = list(self._set_in(place, inside(function), name))
            if found:
                return found
            if name in arguments_of(function):
                return list(self._given(place, function, name))
            function = _enclosing(place.file, function)
            place = replace(place, function=function)
        tree = tree_of(place.file)
        return list(self._set_in(place, iter(tree.body), name)) if tree is not None else []

    def of_attribute(self, node: ast.Attribute) -> list[Bound]:
        """What an attribute of this name was set to, in any object, or what its property gives."""
        is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
        if hasattr(Tensor, node.attr) and not is_own:
            return []
        found = [one for file in self.run.files for one in self._attribute_in(file, node.attr)]
        return found or [one for file in self.run.files for one in self._returned(file, node.attr)]

    def of_call(self, node: ast.Call) -> list[Bound]:
        """What a function of the user's has returned or yielded, or what an object of it gives."""
        found: list[Bound] = []
        for file in self.run.files:
            found += self._returned(file, called_name(node))
            for owner in classes_in(file) if called_name(node) else ():
                for method in GOING_THROUGH if owner.name == called_name(node) else ():
                    found += self._returned(file, method, owner)
        return found

    def calls(self, name: str) -> Iterator[tuple[SourceLine, ast.Call]]:
        """All calls of what has this name in the user's code that have run."""
        for file, node in self.run.nodes():
            if isinstance(node, ast.Call) and called_name(node) == name:
                for at, _ in self._ran(file, node):
                    yield at, node

    def _ran(self, file: str, expression: ast.expr) -> Iterator[Bound]:
        """The expression with its place, if it has run."""
        at = place_of(file, expression.lineno)
        if at is not None and self.run.has_run(at):
            yield at, expression

    def _set_in(self, place: SourceLine, nodes: Iterator[ast.AST], name: str) -> Iterator[Bound]:
        for node in nodes:
            for target, value in settings(node):
                if _is_set(target, name):
                    for at, _ in self._ran(place.file, value):
                        yield at, _matching(target, value, name)

    def _given(self, place: SourceLine, function: Function, name: str) -> Iterator[Bound]:
        called = name_in_calls(place.file, function)
        names, calls = arguments_of(function, keyword_only=False), list(self.calls(called))
        for at, call in calls if len(calls) <= MOST_CALLS else ():
            value = argument_given(call, names, name, called != function.name)
            if value is not None:
                yield at, value

    def _attribute_in(self, file: str, name: str) -> Iterator[Bound]:
        for node in nodes_in(file):
            for target, value in settings(node):
                if _is_attribute(target, name):
                    yield from self._ran(file, value)
        for owner in classes_in(file):
            yield from self._field_of(file, owner, name)

    def _field_of(self, file: str, owner: ast.ClassDef, name: str) -> Iterator[Bound]:
        """What the field of a dataclass was given, also where it has a value of its own."""
        fields = [one for one in owner.body if isinstance(one, ast.AnnAssign)]
        names = [last_name(one.target) for one in fields]
        if name not in names:
            return
        for call in nodes_in(file):
            if not isinstance(call, ast.Call):
                continue
            by_itself = called_name(call) == "cls" and holds(owner, call.lineno)
            if called_name(call) == owner.name or by_itself:
                given = argument_given(call, ["self", *names], name, constructs=True)
                at = place_of(file, call.lineno)
                if given is not None and at is not None and self.run.has_run(at):
                    yield at, given
        value = fields[names.index(name)].value
        default = place_of(file, value.lineno) if value is not None else None
        if default is not None and value is not None:
            yield default, value

    def _returned(self, file: str, name: str, owner: ast.ClassDef | None = None) -> Iterator[Bound]:
        for function in owner.body if owner is not None else nodes_in(file):
            if isinstance(function, FUNCTIONS) and function.name == name:
                for node in inside(function):
                    if isinstance(node, RETURNS) and node.value:
                        yield from self._ran(file, node.value)


def _enclosing(file: str, function: Function) -> Function | None:
    """The function around another one; None if there is none."""
    around = [
        one
        for one in nodes_in(file)
        if isinstance(one, FUNCTIONS)
        and one is not function
        and one.lineno < function.lineno <= (one.end_lineno or 0)
    ]
    return max(around, key=lambda one: one.lineno, default=None)


def _matching(target: ast.expr, value: ast.expr, name: str) -> ast.expr:
    """The part of a value that a name gets, where several names get one each."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, part in zip(target.elts, value.elts, strict=False):
            if _is_set(one, name):
                return part
    return value
