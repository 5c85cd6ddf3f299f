"""The text of a user's file with its syntax tree, and what may stand where in it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TypeVar

# The text of a user's file with its syntax tree, and where in its bytes each node stands.

Node = TypeVar("Node", bound=ast.AST)

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|$)")


class SourceFile:
    """One file. ``text`` is its bytes decoded as utf-8, with the line ends as they are."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.raw = text.encode()
        mark = "\ufeff"  # a byte order mark is part of the bytes, and of no line
        self._starts = _starts_of_lines(self.raw, len(mark.encode()) * text.startswith(mark))
        self.tree = ast.parse(text.removeprefix(mark))
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The bytes of the file in which a node with a position stands."""
        line, column = getattr(node, "lineno"), getattr(node, "col_offset")  # noqa: B009
        last, end = getattr(node, "end_lineno"), getattr(node, "end_col_offset")  # noqa: B009
        return self._starts[line - 1] + column, self._starts[last - 1] + end

    def between(self, start: int, end: int) -> str:
        """The text of some bytes."""
        return self.raw[start:end].decode()

    def text(self, node: ast.AST) -> str:
        """The text of a node as the user has written it."""
        return self.between(*self.span(node))

    def indentation(self, node: ast.AST) -> str | None:
        """The white space before a node; None if something else stands before it on its line."""
        start = self._starts[getattr(node, "lineno") - 1]  # noqa: B009
        before = self.between(start, self.span(node)[0])
        return before if not before.strip() else None

    def line_end(self) -> str:
        """How the file ends its lines."""
        first = _LINE.match(self.raw)
        return "\r\n" if first and first[0].endswith(b"\r\n") else "\n"

    def parents_of(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, from the inside."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements of the block in which a statement stands."""
        for _, block in ast.iter_fields(self.parents[statement]):
            if isinstance(block, list) and any(one is statement for one in block):
                return block
        return [statement]

    def index_in_block(self, statement: ast.stmt) -> int:
        """The number of a statement in its block, from 0."""
        return next(i for i, one in enumerate(self.block_of(statement)) if one is statement)

    def nearest(self, node: ast.AST, *kinds: type[Node]) -> Node | None:
        """The innermost node of these kinds around a node."""
        for parent in self.parents_of(node):
            if isinstance(parent, kinds):
                return parent
        return None


def _starts_of_lines(raw: bytes, first: int) -> list[int]:
    """Where each line begins. Only what ends a line for Python counts: a form feed does not."""
    starts = [match.start() for match in _LINE.finditer(raw)]
    return [first, *starts[1:]]


# Whether an expression needs parentheses in the place where an edit puts it.

_BARE_TUPLE, _CONDITIONAL, _OR, _AND, _NOT, _COMPARISON = -1, 0, 1, 2, 3, 4
_SUM, _PRODUCT, _SIGN, _POWER, _CLOSED = 9, 10, 11, 12, 14

_STRENGTHS: dict[type[ast.AST], int] = {
    ast.Or: _OR,
    ast.And: _AND,
    ast.BitOr: 5,
    ast.BitXor: 6,
    ast.BitAnd: 7,
    ast.LShift: 8,
    ast.RShift: 8,
    ast.Add: _SUM,
    ast.Sub: _SUM,
    ast.Mult: _PRODUCT,
    ast.Div: _PRODUCT,
    ast.FloorDiv: _PRODUCT,
    ast.Mod: _PRODUCT,
    ast.MatMult: _PRODUCT,
    ast.Pow: _POWER,
}


def strength(node: ast.expr, text: str) -> int:
    """How strongly an expression holds together; the order is that of Python's grammar."""
    match node:
        case ast.NamedExpr() | ast.Yield() | ast.YieldFrom() | ast.Starred():
            return -2
        case ast.Tuple():
            return _CLOSED if text.startswith("(") else _BARE_TUPLE
        case ast.IfExp() | ast.Lambda():
            return _CONDITIONAL
        case ast.BoolOp(op=operator):
            return _STRENGTHS[type(operator)]
        case ast.BinOp(op=operator):
            return _STRENGTHS[type(operator)]
        case ast.UnaryOp(op=sign):
            return _NOT if isinstance(sign, ast.Not) else _SIGN
        case ast.Compare():
            return _COMPARISON
        case ast.Await():
            return _POWER + 1
        case _:
            return _CLOSED


def needed_strength(parent: ast.AST, node: ast.expr) -> int:
    """How strongly an expression must hold together that takes the place of a node."""
    match parent:
        case ast.Assign() | ast.AugAssign() | ast.Return() | ast.Expr():
            return _BARE_TUPLE
        case ast.Subscript(slice=index) if index is node:
            return _BARE_TUPLE
        case ast.Attribute() | ast.Subscript() | ast.Await():
            return _CLOSED
        case ast.Call(func=called):
            return _CLOSED if called is node else _CONDITIONAL
        case ast.BinOp(left=left, op=operator):
            own = _STRENGTHS[type(operator)]
            first_binds = isinstance(operator, ast.Pow)
            return own + ((node is left) if first_binds else (node is not left))
        case ast.BoolOp(op=operator):
            return _STRENGTHS[type(operator)] + 1
        case ast.Compare() | ast.Starred():
            return _COMPARISON + 1
        case ast.UnaryOp(op=sign):
            return _NOT if isinstance(sign, ast.Not) else _SIGN
        case ast.IfExp(orelse=other):
            return _CONDITIONAL if node is other else _OR
        case ast.comprehension():
            return _OR
        case _:
            return _CONDITIONAL


def are_needed(text: str, parent: ast.AST, node: ast.expr) -> bool:
    """True if a text that takes the place of a node needs parentheses there."""
    new = _parsed(text)
    if new is None:
        return False  # it is no expression, but part of a slice
    if new == _CLOSED:
        return False
    return "\n" in text or new < needed_strength(parent, node)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> int | None:
    try:
        return strength(ast.parse(f"({text}\n)", mode="eval").body, text)
    except SyntaxError:
        return None


def joined(left: str, sign: str, right: str) -> str:
    """Two expressions with an operator between them, in parentheses where they need them."""
    whole = ast.parse(f"a {sign} b", mode="eval").body
    match whole:
        case ast.BinOp(left=first, right=second):
            pass
        case ast.Compare(left=first, comparators=[second]):
            pass
        case ast.BoolOp(values=[first, second]):
            pass
        case _:
            raise AssertionError(sign)
    ends = [
        f"({text})" if are_needed(text, whole, node) else text
        for text, node in ((left, first), (right, second))
    ]
    return f"{ends[0]} {sign} {ends[1]}"


def closed(text: str) -> str:
    """An expression that can get an attribute or an index, in parentheses if it needs them."""
    new = _parsed(text)
    return text if new == _CLOSED and not text[:1].isdigit() else f"({text})"


# The names that a function can use, and which of them can stand for each other.

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


def scope_of(node: ast.AST, source: SourceFile, values: Values) -> Scope | None:
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


def _comprehension_targets(node: ast.AST, source: SourceFile) -> Iterator[str]:
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


# What the classes of a file have: attributes, with what the source says of their values.


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


# What a file says of its classes, functions, strings and imports, which edits make use of.


class FileFacts:
    """Facts of one file; each is computed when an edit first asks for it."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source

    @cached_property
    def attributes(self) -> dict[str, list[str]]:
        """The attributes that the file reads or sets on an expression, which is not called.

        Those of ``self`` have the name of their class before them, as in ``Trainer.self``.
        """
        found: dict[str, list[str]] = defaultdict(list)
        for node in ast.walk(self._source.tree):
            if isinstance(node, ast.Attribute) and not self._is_called(node):
                known = found[self.owner(node.value)]
                if node.attr not in known:
                    known.append(node.attr)
        return dict(found)

    def owner(self, node: ast.expr) -> str:
        """A name for the object that an expression stands for."""
        text = self._source.text(node)
        first, dot, rest = text.partition(".")
        return f"{self.owner_of_self(node)}{dot}{rest}" if first == "self" else text

    def owner_of_self(self, node: ast.AST) -> str:
        """A name for what ``self`` is at a node."""
        around = self._source.nearest(node, ast.ClassDef)
        return f"{around.name if around else ''}.self"

    def own_attributes(self, node: ast.AST) -> list[str]:
        """The attributes of ``self`` at a node, as in ``self.count``."""
        return [f"self.{name}" for name in self.attributes.get(self.owner_of_self(node), [])]

    def _is_called(self, node: ast.expr) -> bool:
        parent = self._source.parents[node]
        return isinstance(parent, ast.Call) and parent.func is node

    @cached_property
    def modules(self) -> dict[str, str]:
        """The modules and functions that the file imports, by the names that it gives them."""
        found: dict[str, str] = {}
        for node in ast.walk(self._source.tree):
            if isinstance(node, ast.Import):
                for one in node.names:
                    whole = one.name if one.asname else one.name.split(".")[0]
                    found[one.asname or whole] = whole
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for one in node.names:
                    found[one.asname or one.name] = f"{node.module}.{one.name}"
        return found

    def imported_as(self, name: str) -> str | None:
        """How the file can write something of torch, such as "torch.distributed.all_reduce".

        What the file has imported is used, and nothing is imported in addition: a reader copies
        the edit as it stands.
        """
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            prefix = ".".join(parts[:length])
            for alias, whole in self.modules.items():
                if whole == prefix:
                    return ".".join([alias, *parts[length:]])
        return None

    @cached_property
    def world_size(self) -> str | None:
        """How the file can ask for the world size."""
        called = self.imported_as("torch.distributed.get_world_size")
        return f"{called}()" if called else None

    @cached_property
    def all_reduce(self) -> str | None:
        """How the file can call all_reduce."""
        return self.imported_as("torch.distributed.all_reduce")

    @cached_property
    def get_rank(self) -> str | None:
        """How the file can ask for the number of this rank."""
        called = self.imported_as("torch.distributed.get_rank")
        return f"{called}()" if called else None

    @cached_property
    def classes(self) -> list[dict[str, str]]:
        """For each class its attributes, with what the source says of their values."""
        return attributes_of_classes(self._source.tree)

    def attributes_beside(self, node: ast.Attribute) -> list[str]:
        """Other attributes that the object of this one has; those known to be like it first.

        Those of another type are left out.
        """
        alike: list[str] = []
        unknown = list(self.attributes.get(self.owner(node.value), []))
        for attributes in self.classes:
            own = attributes.get(node.attr)
            if own is not None:
                alike += [name for name, text in attributes.items() if own and text == own]
                unknown += [name for name, text in attributes.items() if not (own and text)]
                others = {name for name, text in attributes.items() if own and text}
                unknown = [name for name in unknown if name not in others]
        found = dict.fromkeys([*alike, *unknown])
        return [name for name in found if name != node.attr and not name.startswith("__")]

    @cached_property
    def strings(self) -> Strings:
        """The strings of the file, and which can stand for each other."""
        return Strings(self._source.tree)

    @cached_property
    def constants(self) -> list[str]:
        """The numbers that the module defines at its top."""
        return [
            target.id
            for node in self._source.tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value.value, int | float)
        ]

    def functions_at(self, node: ast.AST) -> dict[str, int]:
        """The functions of the file that can be called at a node, with the arguments they need.

        Methods of the class around the node have ``self.`` before them. Functions around the
        node are left out, and those that call them, so that none calls itself. What is called
        nowhere in the file is not for this file to call.
        """
        around = list(self._source.parents_of(node))
        names = {one.name for one in around if isinstance(one, ast.FunctionDef)}
        in_class = self._source.nearest(node, ast.ClassDef)
        listed = [("", one) for one in self._source.tree.body]
        listed += [("self.", one) for one in in_class.body] if in_class else []
        return {
            before + one.name: _needed_arguments(one, skip=bool(before))
            for before, one in listed
            if isinstance(one, ast.FunctionDef)
            and one not in around
            and one.name in self._called
            and _returns_something(one)
            and not names & _names_in(one)
            and not one.decorator_list
            and not one.name.startswith("__")
        }

    @cached_property
    def _called(self) -> set[str]:
        calls = [node.func for node in ast.walk(self._source.tree) if isinstance(node, ast.Call)]
        return {one.id for one in calls if isinstance(one, ast.Name)} | {
            one.attr for one in calls if isinstance(one, ast.Attribute)
        }


def _returns_something(function: ast.FunctionDef) -> bool:
    is_said = isinstance(function.returns, ast.Constant) and function.returns.value is None
    return not is_said and any(
        isinstance(node, ast.Return) and node.value is not None for node in ast.walk(function)
    )


def _names_in(function: ast.FunctionDef) -> set[str]:
    return {one.id for one in ast.walk(function) if isinstance(one, ast.Name)} | {
        one.attr for one in ast.walk(function) if isinstance(one, ast.Attribute)
    }


def _needed_arguments(function: Function, skip: bool) -> int:
    arguments = function.args
    if arguments.vararg or any(default is None for default in arguments.kw_defaults):
        return 0
    return len(arguments.posonlyargs + arguments.args) - len(arguments.defaults) - skip


# Which nodes of a file may be edited: what computes something, and nothing that only says it.

_NEVER = (
    ast.JoinedStr,
    ast.Assert,
    ast.Raise,
    ast.Import,
    ast.ImportFrom,
    ast.Global,
    ast.Nonlocal,
    ast.pattern,
    ast.arguments,
    ast.operator,
    ast.cmpop,
    ast.expr_context,
)

_MESSAGES = {"print", "warn", "log", "debug", "info", "warning", "error", "exception", "critical"}


def editable_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside functions that may be edited, in the order of the file."""
    yield from _below(tree, inside=False)


def _below(node: ast.AST, inside: bool) -> Iterator[ast.AST]:
    for child in _children(node):
        if isinstance(child, _NEVER) or _only_says_something(child):
            continue
        if inside and not isinstance(child, Function | ast.ClassDef):
            yield child
        yield from _below(child, inside or isinstance(child, Function))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that are run with it: no decorators, defaults or annotations."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield from node.body
        case ast.Lambda():
            yield node.body
        case ast.AnnAssign():
            yield from (part for part in (node.target, node.value) if part is not None)
        case _:
            yield from ast.iter_child_nodes(node)


def _only_says_something(node: ast.AST) -> bool:
    """True for a docstring, a message, and text that is put together."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name in _MESSAGES
        case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod()):
            return True
        case ast.Call(func=ast.Attribute(attr="format")):
            return True
        case _:
            return False


# Which strings of a file can stand for each other.


class Strings:
    """The strings of a file by where they are used: two that share a use can be exchanged."""

    def __init__(self, tree: ast.AST) -> None:
        self._by_use: dict[str, list[str]] = defaultdict(list)
        self._uses: dict[ast.AST, list[str]] = defaultdict(list)
        self._together: list[list[str]] = []
        for node in ast.walk(tree):
            self._together += _members(node)
            for use, part in _uses(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    self._uses[part].append(use)
                    if part.value not in self._by_use[use]:
                        self._by_use[use].append(part.value)

    def exchangeable(self, node: ast.Constant) -> list[str]:
        """The strings that are listed with this one, or used as this one is."""
        uses = self._uses.get(node, [])
        used = [text for use in uses for text in self._by_use[use]]
        beside = [text for texts in self._together if node.value in texts for text in texts]
        return [*beside, *used] if uses else []


def _members(node: ast.AST) -> Iterator[list[str]]:
    """The strings of a tuple, list or set, or the keys of a dict: names of things of one kind."""
    match node:
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            pass
        case ast.Dict():
            parts = [key for key in node.keys if key is not None]
        case _:
            return
    texts = [one.value for one in parts if isinstance(one, ast.Constant)]
    if len(texts) > 1 and all(isinstance(text, str) for text in texts):
        yield [str(text) for text in texts]


def _uses(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Each part of a node with a name for what it is used for."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            for position, argument in enumerate(node.args):
                yield f"{name}({position})", argument
            for keyword in node.keywords:
                yield f"{name}({keyword.arg})", keyword.value
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=index):
            yield f"{name}[]", index
        case ast.Compare():
            for one in (node.left, *node.comparators):
                yield "compared", one
        case ast.Tuple() | ast.List() | ast.Set():
            for one in node.elts:
                yield "member", one
        case _:
            return
