"""Which line of the user's code set a value: what names, attributes and calls were given."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from ddp_equivalence.diagnosis.lines.source import (
    COMPREHENSIONS,
    FUNCTIONS,
    RETURNS,
    Function,
    RunLines,
    SourceLine,
    arguments_of,
    called_name,
    classes_in,
    default_of,
    functions_named,
    holds,
    inside,
    is_attribute_of,
    is_set_by,
    last_name,
    modules_in,
    nodes_in,
    place_at,
    place_of,
    tree_of,
)
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.measurement.calls import CodeLine

COMPUTING = frozenset({"divmod", "min", "max", "ceil", "floor", "round"})
"""Functions that compute a number of others."""

FILLING = frozenset({"append", "extend", "insert", "update", "add", "copy_", "add_", "setdefault"})
"""Methods that change what they are called on."""

SEEDING = frozenset({"manual_seed", "seed"})
"""The methods that decide which random numbers an object gives."""


@dataclass(frozen=True)
class Origin:
    """``name``: of the variable, attribute, argument or function that got or gave the value.

    ``chooses``: it does not hold the values, but says which of them are taken. ``depth``: so many
    names were looked up to come here.
    """

    place: SourceLine
    expression: ast.expr
    name: str = ""
    chooses: bool = False
    depth: int = 0

    @property
    def line(self) -> CodeLine:
        """The line of the statement that gives the value, or of an expression inside it."""
        is_all = self.place.value is self.expression
        return self.place.line(self.place.statement if is_all else self.expression)

    @property
    def gives(self) -> str:
        """What its line does, for a note: it sets n, passes n, or returns the value of n()."""
        node, name = self.place.statement, self.name
        if isinstance(node, ast.Return):
            return f"returns the value of {name}()"
        targets = [target for one in ast.walk(node) for target, _ in settings(one)]
        is_set = any(is_set_by(one, name) or is_attribute_of(one, name) for one in targets)
        return f"{'sets' if is_set or isinstance(node, FUNCTIONS) else 'passes'} {name}"

    @property
    def computes(self) -> bool:
        """True if it is made by arithmetic or a comparison, not only handed on."""
        return any(
            isinstance(node, (ast.BinOp, ast.Compare, ast.IfExp))
            or (isinstance(node, ast.Call) and called_name(node) in COMPUTING)
            for node in ast.walk(self.expression)
        )

    @property
    def selects(self) -> bool:
        """True if it takes a part of something, or lists what it takes one by one."""
        return any(map(_selects, ast.walk(self.expression)))

    @property
    def fills(self) -> bool:
        """True if a method puts it into what has the name already, or seeds this with it."""
        call = self.place.value if isinstance(self.place.statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or called_name(call) not in FILLING | SEEDING:
            return False
        return self.expression in call.args

    @property
    def key(self) -> tuple[str, int, int, int, str]:
        """Tells the expression from all others."""
        node = self.expression
        kind = type(node).__name__
        return self.place.file, node.lineno, node.col_offset, node.end_col_offset or 0, kind


def _selects(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        number = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return isinstance(node.slice, ast.Slice) or type(number) is int
    if isinstance(node, COMPREHENSIONS):
        return any(one.ifs for one in node.generators)
    if isinstance(node, ast.Call):
        return called_name(node) in ("filter", "islice")
    listed = node.elts if isinstance(node, (ast.List, ast.Tuple)) else []
    return bool(listed) and all(isinstance(one, (ast.Attribute, ast.Name)) for one in listed)


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


def _matching(
    target: ast.expr, value: ast.expr, name: str, is_set: Callable[[ast.expr, str], bool]
) -> ast.expr:
    """The part of a value that a name gets, where several names get one each."""
    for number, one in enumerate(target.elts if isinstance(target, ast.Tuple) else ()):
        if is_set(one, name) and isinstance(value, ast.Tuple) and number < len(value.elts):
            return value.elts[number]
    return value


GOING_THROUGH = ("__iter__", "__getitem__", "__getitems__", "__next__", "__call__")
"""The methods by which an object gives what it holds."""

MOST_CALLS = 4
"""A function that is called at more places is not followed to its callers."""

MOST_LINKS = 8
"""So many lines are followed from an expression to where it comes from."""

MOST_EXPRESSIONS = 400
"""So many expressions are followed where a name may have been given several things."""

OF_A_MODULE = frozenset(
    {"parameters", "named_parameters", "modules", "named_modules", "children", "named_children"}
    | {"state_dict"}
)
"""Methods that give all of a module, whatever line has made the module."""

OF_AN_OPTIMIZER = ("param_groups",)
"""Attributes that give back what an object was made of."""


@dataclass(frozen=True)
class Origins:
    """Looks names up in the source of what has run. A name may have been given several things."""

    run: RunLines
    _known: dict[tuple[str, int, int, int, str], list[Origin]] = field(default_factory=dict)

    def of(self, at: Origin) -> list[Origin]:
        """What a name or an attribute was given, or what a call returned."""
        if at.key not in self._known:
            self._known[at.key] = list(self._looked_up(at.place, at.expression))
        return self._known[at.key]

    def _looked_up(self, place: SourceLine, node: ast.expr) -> Iterable[Origin]:
        if isinstance(node, ast.Name):
            return self._of_name(place, node) if node.id != "self" else ()
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            is_own = owner == "self"
            if owner in modules_in(place.file):
                return ()
            return self.of_attribute(node.attr) if is_own or not hasattr(Tensor, node.attr) else ()
        return self.of_call(node) if isinstance(node, ast.Call) else ()

    def _of_name(self, place: SourceLine, node: ast.Name) -> list[Origin]:
        """What a variable was given, in its function or around it, or what its callers gave."""
        name, function = node.id, place.function
        for around in place.nodes:
            if isinstance(around, COMPREHENSIONS) and any(one is node for one in ast.walk(around)):
                for one in around.generators:
                    if is_set_by(one.target, name):
                        return [Origin(place, one.iter, name)]
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

    def of_attribute(self, name: str) -> list[Origin]:
        """What an attribute of this name was set to, in any object, or what its property gives."""
        return [one for file in self.run.files for one in self._attribute_in(file, name)]

    def of_call(self, node: ast.Call) -> list[Origin]:
        """What a function of the user's has returned or yielded, or what an object of it gives."""
        found: list[Origin] = []
        for file in self.run.files:
            found += self._returned(file, called_name(node))
            for owner in classes_in(file) if called_name(node) else ():
                for method in GOING_THROUGH if owner.name == called_name(node) else ():
                    found += self._returned(file, method, owner)
        return found

    def _ran(self, file: str, expression: ast.expr, name: str) -> Iterator[Origin]:
        """The expression with its place, if it has run."""
        at = place_of(file, expression.lineno)
        if at is not None and self.run.has_run(at):
            yield Origin(at, expression, name)

    def _set_in(self, place: SourceLine, nodes: Iterator[ast.AST], name: str) -> Iterator[Origin]:
        for node in nodes:
            for target, value in settings(node):
                if is_set_by(target, name):
                    given = _matching(target, value, name, is_set_by)
                    yield from self._ran(place.file, given, name)

    def _given(self, place: SourceLine, function: Function, name: str) -> Iterator[Origin]:
        called = _name_in_calls(place.file, function)
        names = arguments_of(function, keyword_only=False)
        calls = [
            one
            for file, node in self.run.nodes()
            if isinstance(node, ast.Call) and called_name(node) == called
            for one in self._ran(file, node, name)
        ]
        for one in calls if len(calls) <= MOST_CALLS else ():
            assert isinstance(one.expression, ast.Call)
            value = argument_given(one.expression, names, name, called != function.name)
            if value is not None:
                yield replace(one, expression=value)
            elif (default := default_of(function, name)) is not None and not _is_open(one):
                yield Origin(SourceLine(place.file, function, function, ()), default, name)

    def _attribute_in(self, file: str, name: str) -> Iterator[Origin]:
        for node in nodes_in(file):
            for target, value in settings(node):
                if is_attribute_of(target, name):
                    given = _matching(target, value, name, is_attribute_of)
                    yield from self._ran(file, given, name)
        for owner in classes_in(file):
            yield from self._field_of(file, owner, name)
            if any(_is_property(one, name) for one in owner.body):
                yield from self._returned(file, name, owner)

    def _field_of(self, file: str, owner: ast.ClassDef, name: str) -> Iterator[Origin]:
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
                    yield Origin(at, given, name)
        value = fields[names.index(name)].value
        default = place_of(file, value.lineno) if value is not None else None
        if default is not None and value is not None:
            yield Origin(default, value, name)

    def _returned(
        self, file: str, name: str, owner: ast.ClassDef | None = None
    ) -> Iterator[Origin]:
        for function in owner.body if owner is not None else nodes_in(file):
            if isinstance(function, FUNCTIONS) and function.name == name:
                for node in inside(function):
                    if isinstance(node, RETURNS) and node.value:
                        yield from self._ran(file, node.value, name)

    def chain(self, at: Origin, way: Sequence[CodeLine] = ()) -> list[Origin]:
        """What made an expression, the nearest first, as long as only one thing can be meant.

        ``way``: the lines that led to the function, which say which of its calls counts.
        """
        if at.depth >= MOST_LINKS:
            return []
        given = [one for one in self.of(at) if not one.fills]
        on_way = [one for one in given if any(_is_on(one.place, line) for line in way)]
        if given:
            one = replace((on_way or given)[0], depth=at.depth + 1)
            is_sole = len({other.line for other in on_way or given}) == 1
            return [one, *self.chain(one, way)] if is_sole else []
        parts = (replace(at, expression=part) for part in _parts(at.expression))
        return next(filter(None, (self.chain(one, way) for one in parts)), [])

    def all(self, begin: Sequence[Origin], deepest: int = MOST_EXPRESSIONS) -> list[Origin]:
        """All expressions that these were made of, the nearest first, with these."""
        found: dict[tuple[object, ...], Origin] = {}
        waiting = deque(begin)
        while waiting and len(found) < MOST_EXPRESSIONS:
            one = waiting.popleft()
            if (*one.key, one.chooses) not in found:
                found[(*one.key, one.chooses)] = one
                waiting.extend(self._made_of(one) if one.depth < deepest else ())
        return list(found.values())

    def _made_of(self, at: Origin) -> Iterator[Origin]:
        for node, chooses in _mentions(at.expression, at.chooses):
            for one in self.of(replace(at, expression=node)):
                yield replace(one, chooses=chooses, depth=at.depth + 1)


def _is_on(place: SourceLine, line: CodeLine) -> bool:
    return place.file == line.file and holds(place.statement, line.number)


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


def _name_in_calls(file: str, function: Function) -> str:
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


def _is_open(call: Origin) -> bool:
    """True if a call gives arguments from a list or a dictionary, which its line does not name."""
    assert isinstance(call.expression, ast.Call)
    starred = any(isinstance(one, ast.Starred) for one in call.expression.args)
    return starred or any(keyword.arg is None for keyword in call.expression.keywords)


def _parts(expression: ast.expr) -> Iterator[ast.expr]:
    """What an expression is made of, as far as values go through it."""
    if isinstance(expression, ast.Call):
        if called_name(expression) in OF_A_MODULE:
            return
        yield from expression.args
        if isinstance(expression.func, ast.Attribute):
            yield expression.func.value
    elif isinstance(expression, COMPREHENSIONS):
        yield from (one.iter for one in expression.generators)
    elif isinstance(expression, (ast.Subscript, ast.Starred)):
        yield expression.value
    elif isinstance(expression, ast.Attribute):
        yield from [expression.value] if expression.attr in OF_AN_OPTIMIZER else []
    elif isinstance(expression, ast.BinOp):
        yield from (expression.left, expression.right)
    elif isinstance(expression, ast.UnaryOp):
        yield expression.operand
    elif isinstance(expression, (ast.List, ast.Tuple)):
        yield from expression.elts


def made_of(run: RunLines, at: Origin, way: Sequence[CodeLine] = ()) -> list[Origin]:
    """What made an expression, the nearest first; with itself, if it selects."""
    return [*([at] if at.selects else []), *Origins(run).chain(at, way)]


def of_line(run: RunLines, line: CodeLine, way: Sequence[CodeLine] = ()) -> list[Origin]:
    """What made the value that a line gives, and this value itself, the nearest first."""
    place = place_at(line)
    if place is None or place.value is None:
        return []
    own = Origin(place, place.value)
    return [own, *Origins(run).chain(own, way)]


def set_at(run: RunLines, given: Origin) -> Origin:
    """The nearest that computed what is given here; else the one that set it, as far back as only
    one line can be meant.
    """
    found = [given, *Origins(run).chain(given)]
    return next((one for one in found if one.computes), found[-1])


def chosen(found: Sequence[Origin]) -> Origin | None:
    """The nearest that selects; without one, the farthest that is known."""
    return next((one for one in found if one.selects), found[-1] if found else None)


def given_at(
    line: CodeLine, names: Sequence[str], number: int | None = None, called: Collection[str] = ()
) -> Origin | None:
    """What the call on a line gives for the first argument that has one of these names.

    ``number``: its place among the others, where it may be given without a name. ``called``: the
    functions that may be meant; any if there is none.
    """
    place = place_at(line)
    if place is None:
        return None
    for node in place.nodes:
        is_meant = isinstance(node, ast.Call) and (called_name(node) in called or not called)
        if isinstance(node, ast.Call) and is_meant and holds(node, line.number):
            named = [(one.value, one.arg or "") for one in node.keywords if one.arg in names]
            listed = node.args[number : number + 1] if number is not None else []
            for value, name in (*named, *((one, names[0]) for one in listed)):
                return Origin(place, value, name)
    return None


def gone_through(run: RunLines, way: Sequence[CodeLine]) -> list[Origin]:
    """What made that which the innermost loop around a line goes through, the nearest first.

    ``way``: as in ``decisions``. The first line that stands in a loop counts.
    """
    for number, line in enumerate(way):
        place = place_at(line)
        if place is None:
            continue
        for expression in _iterables(place, line.number):
            if isinstance(expression, ast.Call) and called_name(expression) == "range":
                return []  # it counts, and goes through nothing that was made
            return made_of(run, Origin(place, expression), way[number + 1 :])
    return []


def _iterables(place: SourceLine, number: int) -> Iterator[ast.expr]:
    """What comprehensions on this line, and then the loops around it, go through."""
    for node in place.nodes:
        if isinstance(node, COMPREHENSIONS) and holds(node, number):
            yield from (one.iter for one in node.generators)
    for loop in (place.statement, *place.loops):
        if isinstance(loop, (ast.For, ast.AsyncFor)):
            yield loop.iter


def line_of_compared(run: RunLines, test: ast.expr | None, at: CodeLine) -> list[PointedLine]:
    """The line that set an attribute which a condition compares, rather one that is not counted up
    or down; [] if it was set to several things.
    """
    found: list[tuple[bool, PointedLine]] = []
    for node in ast.walk(test) if isinstance(test, ast.Compare) else ():
        if isinstance(node, ast.Attribute):
            every = Origins(run).of_attribute(node.attr)
            given = [one for one in every if not isinstance(one.place.statement, ast.AugAssign)]
            if len({ast.unparse(one.expression) for one in given}) == 1:
                made = set_at(run, given[0])
                note = f"sets {node.attr}, which line {at.number} compares"
                if made.name not in ("", node.attr):
                    note = f"sets {made.name}, of which {node.attr} is made"
                found.append((len(given) < len(every), PointedLine(made.line, note)))
    return [line for _, line in sorted(found, key=lambda one: one[0])][:1]


SCALING = frozenset({"div", "div_", "mul", "mul_", "_foreach_div_", "_foreach_mul_", "true_divide"})
"""The functions of torch that divide or multiply by their last argument."""


def divisors(run: RunLines, line: CodeLine) -> list[Origin]:
    """What made the number by which this line divides or multiplies, the nearest first."""
    place = place_at(line)
    for expression in _divisors_in(place.nodes) if place is not None else ():
        number = expression.right if isinstance(expression, ast.BinOp) else expression
        return made_of(run, Origin(place, number)) if place is not None else []
    return []


COUNTING = frozenset({"len", "numel", "nelement", "size", "shape", "sum", "count_nonzero", "ndim"})


def is_times_a_count(run: RunLines, line: CodeLine) -> bool:
    """True if a line multiplies by what was counted, and not only by numbers that were written."""
    place = place_at(line)
    products = [
        side
        for node in (place.nodes if place is not None else ())
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div))
        for side in (node.left, node.right)
    ]
    sources = [one.expression for one in divisors(run, line)]
    parts = [part for one in (*products, *sources) for part in ast.walk(one)]
    return any(last_name(one) in COUNTING for one in parts if isinstance(one, NAMING))


NAMING = (ast.Name, ast.Attribute)


def divisor_text(line: CodeLine | None) -> str:
    """What this line divides by, as it is written; "" if it divides by several things or none."""
    place = None if line is None else place_at(line)
    texts = {
        ast.unparse(node.right)
        for node in (place.nodes if place is not None else ())
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    }
    return texts.pop() if len(texts) == 1 else ""


def divided_by_in(begins: CodeLine) -> list[str]:
    """The names of the attributes by which a function, or one inside it, divides."""
    functions = functions_named(begins.file, begins.function)
    nodes = (node for function in functions for node in ast.walk(function))
    return [one.attr for one in _divisors_in(nodes) if isinstance(one, ast.Attribute)]


def _divisors_in(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """What the nodes of a syntax tree divide or multiply by."""
    for node in nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Div, ast.Mult)):
            yield node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield node.right
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            # What is called may return the loss.
            numbers = (
                one
                for one in (node.right, node.left)
                if not any(isinstance(part, ast.Call) for part in ast.walk(one))
            )
            yield from list(numbers)[:1]
        elif isinstance(node, ast.Call) and called_name(node) in SCALING and node.args:
            yield node.args[-1]


DEEPEST_NUMBER = 4
"""So often a name is looked up to see whether a number comes from the rank."""

OF_THE_RANK = re.compile(r"rank|world_?size|replica|process_index|process_count|num_processes")
"""Words in the names of what says which rank this is, or how many there are."""

CHOOSING = frozenset(
    {"islice", "narrow", "index_select", "select", "take", "take_along_dim", "masked_select"}
    | {"chunk", "split", "tensor_split", "array_split", "compress", "Subset", "batched"}
)
"""Functions that take a part of their first argument, or of what they are a method of."""

MAKING_INDICES = frozenset({"range", "arange", "slice", "randperm", "linspace"})
"""Functions that make positions of their arguments."""

MODULES = ("torch", "np", "numpy", "itertools", "data")


@dataclass(frozen=True)
class Choice:
    """A line that says which values are taken. ``of_rank``: this depends on the rank. ``names``:
    those of the rank in the line, as they stand there. ``rounds_down``: it divides with ``//``.
    """

    line: CodeLine
    of_rank: bool
    names: tuple[str, ...] = ()
    rounds_down: bool = False


def choices(run: RunLines, line: CodeLine) -> list[Choice]:
    """The lines that choose which values a line holds, the nearest first."""
    found: dict[CodeLine, Choice] = {}
    origins = Origins(run)
    for part in [part for one in _all_of_line(origins, line) for part in _choosing_parts(one)]:
        of_rank = any(map(_names_of_rank, origins.all([part], DEEPEST_NUMBER)))
        if part.line not in found or not found[part.line].of_rank:
            rounds_down = any(isinstance(one, ast.FloorDiv) for one in ast.walk(part.expression))
            found[part.line] = Choice(part.line, of_rank, _names_of_rank(part), rounds_down)
    return list(found.values())


def _is_property(node: ast.AST, name: str) -> bool:
    if not isinstance(node, ast.FunctionDef) or node.name != name:
        return False
    return any((last_name(one) or "").endswith("property") for one in node.decorator_list)


def _all_of_line(origins: Origins, line: CodeLine) -> list[Origin]:
    """All expressions that what a line says was made of, the nearest first, with its own."""
    place = place_at(line)
    if place is None:
        return []
    read = [
        one for one in _heads(place.statement) if not isinstance(getattr(one, "ctx", 0), ast.Store)
    ]
    return origins.all([Origin(place, one) for one in read])


def _names_of_rank(at: Origin) -> tuple[str, ...]:
    """What an expression names of the rank, or of the number of ranks, as it stands there."""

    def names_in(node: ast.AST) -> Iterator[str]:
        name = last_name(node)
        if name and OF_THE_RANK.search(name.lower()):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [node.value] if OF_THE_RANK.search(node.value.lower()) else []
        else:
            for child in ast.iter_child_nodes(node):
                yield from names_in(child)

    return tuple(dict.fromkeys(names_in(at.expression)))


def _heads(statement: ast.stmt) -> list[ast.expr]:
    """The expressions of a statement, without those of the block that it opens."""
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return [item.context_expr for item in statement.items]
    return [one for one in ast.iter_child_nodes(statement) if isinstance(one, ast.expr)]


def in_head(statement: ast.stmt) -> Iterator[ast.AST]:
    """Everything in these expressions that belongs to the same function."""
    return (node for head in _heads(statement) for node in (head, *inside(head)))


def _mentions(node: ast.AST, chooses: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The names, attributes and calls in an expression, and whether they choose what it takes."""
    if isinstance(node, (ast.Name, ast.Attribute, ast.Call)):
        yield node, chooses
    choosing = {id(one) for one in _choosing(node)}
    for child in ast.iter_child_nodes(node):
        yield from _mentions(child, chooses or id(child) in choosing)


def _choosing(node: ast.AST) -> list[ast.expr]:
    """The parts of a node of the syntax tree that say which of the others are taken."""
    if isinstance(node, ast.Subscript):
        return [] if isinstance(node.slice, ast.Constant) else [node.slice]
    if isinstance(node, ast.comprehension):
        return node.ifs
    if not isinstance(node, ast.Call):
        return []
    name = called_name(node)
    if name in MAKING_INDICES:
        return node.args
    if name in CHOOSING:
        # Unlike a method, a function of a module gets the values as its first argument.
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        is_function = owner is None or (isinstance(owner, ast.Name) and owner.id in MODULES)
        return [*node.args[is_function:], *(one.value for one in node.keywords)]
    return node.args[:1] if name == "filter" else []


def _choosing_parts(source: Origin) -> list[Origin]:
    """The parts of an expression that say which values are taken, and compute positions for it."""
    parts = [part for node in ast.walk(source.expression) for part in _choosing(node)]
    parts += [source.expression] if source.chooses and source.computes else []
    return [Origin(source.place, part, chooses=True) for part in parts]
