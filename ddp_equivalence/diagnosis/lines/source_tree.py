"""The user's source as a syntax tree: which of its lines ran, and what decided that they did."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise, takewhile
from typing import Literal

from ddp_equivalence.diagnosis.hypothesis import ranks_by_number
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind

# The user's source code as a syntax tree: what stands around a line, and what it consists of.

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)


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


@lru_cache(maxsize=64)
def tree_of(file: str) -> ast.Module | None:
    """The syntax tree of a file; None if it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


@lru_cache(maxsize=4096)
def place_of(file: str, number: int) -> SourceLine | None:
    """Where a line stands; None if the file cannot be read, or if no statement holds the line."""
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
            if isinstance(one, ast.stmt) and _holds(one, number):
                return branch, one
            if isinstance(one, (ast.ExceptHandler, ast.match_case)):
                inner = _holding(one, number)
                if inner is not None:
                    return branch, inner[1]
    return None


def _holds(node: ast.stmt, number: int) -> bool:
    return node.lineno <= number <= (node.end_lineno or node.lineno)


def loops_around(place: SourceLine) -> Iterator[Loop]:
    """The loops whose bodies hold the line, the innermost first."""
    for one in place.around:
        if isinstance(one.statement, LOOPS) and one.branch == "body":
            yield one.statement


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


def _of_this_loop(body: list[ast.stmt], kind: type[ast.stmt]) -> Iterator[ast.stmt]:
    for one in body:
        if isinstance(one, kind):
            yield one
        elif not isinstance(one, (*LOOPS, *FUNCTIONS, ast.ClassDef)):
            for _, value in ast.iter_fields(one):
                parts = value if isinstance(value, list) else []
                for part in parts:
                    if isinstance(part, ast.stmt):
                        yield from _of_this_loop([part], kind)
                    elif isinstance(part, (ast.ExceptHandler, ast.match_case)):
                        yield from _of_this_loop(part.body, kind)


def called_name(call: ast.Call) -> str:
    """The last part of the name of what is called; "" if it has none."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def functions_named(file: str, name: str) -> list[Function]:
    """The functions and methods of this name in a file."""
    tree = tree_of(file)
    nodes = ast.walk(tree) if tree is not None else ()
    return [one for one in nodes if isinstance(one, FUNCTIONS) and one.name == name]


def is_in_class(line: CodeLine, name: str) -> bool:
    """True for a line that stands in a class of this name."""
    tree = tree_of(line.file)
    return any(
        isinstance(one, ast.ClassDef) and one.name == name and _holds(one, line.number)
        for one in (ast.walk(tree) if tree is not None else ())
    )


# Which lines of the user's code a rank has run, how often, and in which order.

WITHOUT_CODE = (ast.AnnAssign, ast.Global, ast.Nonlocal)
"""Statements that may leave no code, so that no line of theirs ever runs."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


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

    def beside_backward(self, place: SourceLine) -> SourceLine:
        """The place without the statements around it that also hold a call of backward: these do
        not decide about single gradients.
        """
        numbers = [line.number for line in self.backwards if line.file == place.file]
        inner = takewhile(
            lambda one: (
                not any(
                    one.statement.lineno <= number <= (one.statement.end_lineno or 0)
                    for number in numbers
                )
            ),
            place.around,
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

    def has_begun(self, place: SourceLine, body: Sequence[ast.stmt]) -> bool:
        """True if a line of a block of this function has run."""
        first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
        name = place.line(body[0]).function
        return any(
            line.file == place.file and line.function == name and first <= line.number <= last
            for line in self.times
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

    def has_run(self, file: str, function: Function) -> bool:
        """True if a line of the body of this function has run."""
        return bool(self.last_of(file, function))

    def last_of(self, file: str, function: Function) -> int:
        """When a line of the body of this function ran last; 0 if none has."""
        first, last = function.body[0].lineno, function.end_lineno or function.lineno
        return max(
            (
                number
                for line, number in self.last.items()
                if line.file == file
                and line.function == function.name
                and first <= line.number <= last
            ),
            default=0,
        )


def run_lines(view: View, rank: int) -> RunLines:
    """The lines that a rank has run; none if they were not recorded."""
    seen = view.observed.by_rank.get(rank)
    if seen is None:
        return RunLines({}, {})
    backwards = tuple(place.line for place in view.observed.calls.backwards)
    return RunLines(seen.trace.times_run or {}, seen.trace.lines_run or {}, backwards)


# The lines that decided whether, and how often, a line of the user's code ran.

What = Literal["left", "skipped", "condition"]


@dataclass(frozen=True)
class Decision:
    """``line`` left a loop, went on with its next pass, or is a condition that chose a branch.

    ``note``: what was seen of it, as a clause. ``chosen``: a condition chose this branch so often,
    of ``times``. ``test``: the condition itself.
    """

    line: CodeLine
    what: What
    note: str
    chosen: int = 0
    times: int = 0
    test: ast.expr | None = None

    def pointed(self, is_fault: bool = True) -> PointedLine:
        """The line, to be shown in a report."""
        return PointedLine(self.line, self.note, is_fault)


def decisions(run: RunLines, way: Sequence[CodeLine]) -> list[Decision]:
    """What decided that a line ran, the nearest first.

    ``way``: the line, and the lines that led to it, the innermost first. Conditions that were the
    same each time have decided nothing.
    """
    found: list[Decision] = []
    for line in way:
        place = place_of(line.file, line.number)
        if place is not None and place.function is not None:
            place = run.beside_backward(place)
            found += [one for one in conditions(run, place) if one.chosen < one.times]
            found += _ways_out(run, place)
    return found


def conditions(run: RunLines, place: SourceLine) -> Iterator[Decision]:
    """The conditions of this function around a line, the innermost first."""
    for one in place.around:
        if isinstance(one.statement, ast.If):
            decision = _condition(run, place, one.statement, one.branch)
            if decision is not None:
                yield decision


def _condition(run: RunLines, place: SourceLine, node: ast.If, branch: str) -> Decision | None:
    body, other = node.body, node.orelse
    if branch != "body":
        body, other = other, body
    if body[0].lineno == node.lineno or not run.count(place, node):
        return None
    times, chosen = run.exact_count(place, node), run.times_begun(place, body)
    if times is not None and other and (chosen is None or isinstance(body[0], ast.If)):
        others = run.times_begun(place, other)
        chosen = None if others is None else times - others
    name, is_not = _name_of(node.test)
    line, seen = place.line(node), f"decides whether line {place.statement.lineno} runs"
    if times is not None and chosen is not None:
        seen = f"{'true' if branch == 'body' else 'false'} {chosen} of {times} times"
    else:
        times = chosen = 0
    set_at = _only_line_that_sets(run, place, name) if name else None
    if set_at is not None:
        if times:
            truth = "true" if (branch == "body") != is_not else "false"
            seen = f"{name} is {truth} {chosen} of {times} times"
        return Decision(set_at, "condition", seen, chosen, times)
    return Decision(line, "condition", seen, chosen, times, node.test)


def _name_of(test: ast.expr) -> tuple[str, bool]:
    """The variable that is a condition, and whether the condition is its contrary."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        name, is_not = _name_of(test.operand)
        return name, not is_not
    return (test.id, False) if isinstance(test, ast.Name) else ("", False)


def _only_line_that_sets(run: RunLines, place: SourceLine, name: str) -> CodeLine | None:
    lines = lines_that_set_variable(run, place, name)
    return lines[0] if len(lines) == 1 else None


def lines_that_set_variable(run: RunLines, place: SourceLine, name: str) -> list[CodeLine]:
    """The lines of this function that have run and set a variable of this name."""
    found: dict[CodeLine, None] = {}
    for node in inside(place.function) if place.function is not None else ():
        if isinstance(node, ast.stmt) and name in _names_set(node):
            line = place.line(node)
            if run.times.get(line):
                found[line] = None
    return list(found)


def _names_set(node: ast.stmt) -> set[str]:
    """The variables that a statement sets, without those that the statements inside it set."""
    parts: list[ast.expr | None] = []
    if isinstance(node, ast.Assign):
        parts = [*node.targets]
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor)):
        parts = [node.target]
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        parts = [one.optional_vars for one in node.items]
    return {
        one.id
        for part in parts
        if part is not None
        for one in ast.walk(part)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }


def _ways_out(run: RunLines, place: SourceLine) -> Iterator[Decision]:
    """The statements that left the loops around a line, or skipped the rest of a pass."""
    for loop in loops_around(place):
        for node in leaving(loop):
            if run.count(place, node) and not _is_on_one_line(loop, node):
                word = "returns" if isinstance(node, ast.Return) else "breaks"
                passes = run.exact_count(place, loop)
                begun = _beginnings(run, place)
                seen = f", in pass {passes} of it" if begun == 1 and passes else ""
                note = f"{word} from inside the loop of line {loop.lineno}{seen}"
                yield Decision(place.line(node), "left", note)
        for node in skipping(loop):
            times = run.exact_count(place, node)
            if times and node.lineno < place.statement.lineno:
                passed = "a pass" if times == 1 else f"{times} passes"
                yield Decision(place.line(node), "skipped", f"ends {passed} of the loop here")


def _is_on_one_line(loop: ast.stmt, node: ast.stmt) -> bool:
    """True if a condition stands on the line of the statement, which may then not have run."""
    return any(
        isinstance(parent, ast.stmt) and parent.lineno == node.lineno
        for parent in ast.walk(loop)
        if any(child is node for child in ast.iter_child_nodes(parent))
    )


def _beginnings(run: RunLines, place: SourceLine) -> int:
    """How often the function of this place began, as far as its first line shows; 0 if unknown."""
    if place.function is None:
        return 0
    body = [
        one
        for one in place.function.body
        if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
    ]
    if body and isinstance(body[0], LOOPS):
        return 1 if run.exact_count(place, body[0]) == 1 else 0
    return run.times_begun(place, body) or 0


# The two lines of one function that led to two calls, where their order is the fault.


def meeting_lines(first: Call, second: Call) -> tuple[CodeLine, CodeLine] | None:
    """The lines of the innermost function that made both calls, itself or by other functions.

    None if it made both with one line, or if the ways to the calls are not known.
    """
    for here in _way(first):
        for there in _way(second):
            if (here.file, here.function) == (there.file, there.function):
                return None if here.number == there.number else (here, there)
    return None


def at_meeting(
    first: PointedLine | None, second: PointedLine | None, one: Call, other: Call
) -> list[PointedLine]:
    """Two lines of helpers, after the lines of their common caller, which get their marks.

    ``one`` and ``other``: the calls that the lines made, in this order. Only the two lines, if they
    stand in one function already, or if the ways to the calls are not known.
    """
    both = [line for line in (first, second) if line is not None]
    met = meeting_lines(one, other)
    if met is None or first is None or second is None:
        return both
    shown = []
    for line, pointed in zip(met, both, strict=True):
        inside = line.number != pointed.line.number or line.file != pointed.line.file
        where = f", in line {pointed.line.number}" if inside else ""
        note = f"{pointed.note}{where}" if pointed.note else where.removeprefix(", ")
        shown.append(replace(pointed, line=line, note=note))
    known = {(line.file, line.number) for line in met}
    faults_first = sorted(both, key=lambda pointed: not pointed.is_fault)
    rest = [
        replace(pointed, is_fault=False, missing="")
        for pointed in faults_first
        if (pointed.line.file, pointed.line.number) not in known
    ]
    return [*shown, *rest[:1]]


def _way(call: Call) -> tuple[CodeLine, ...]:
    line = call.users_line or call.line
    return () if line is None else (line, *call.callers)


# The lines that call a helper function, where what is wrong is how often or where it is called.

OF_PLACE = frozenset(
    {"reduced_more_than_once", "only_last_micro_batch", "clipped_per_micro_batch"}
    | {"accumulation_boundary_off_by_one", "averaged_twice"}
)
"""The causes in which a right line stands, or is called from, at the wrong place."""

ACTING = (Kind.COLLECTIVE, Kind.CHANGE, Kind.CLIP, Kind.ZERO_GRAD)


def with_call_sites(view: View, lines: Sequence[PointedLine]) -> list[PointedLine]:
    """The lines, and before the first faulty one that stands in a helper, the call of the helper.

    Only for what was done between backward passes, or more than once to the same gradient, and for
    lines that changed gradients: of these the call is no fault by itself.
    """
    known = {one.line for one in lines}
    for number, one in enumerate(lines):
        if one.is_fault and not one.missing:
            sites = [site for site in _sites(view, one.line) if site.line not in known]
            return [*lines[:number], *sites[:1], *lines[number:]]
    return list(lines)


def _sites(view: View, line: CodeLine) -> list[PointedLine]:
    """The lines, beside a backward pass in the same function, that led to this one."""
    rank = min(view.observed.calls.by_rank, default=0)
    calls = view.observed.calls.of(rank)
    made = [one for one in calls if one.kind in ACTING and (one.users_line or one.line) == line]
    made = [one for one in made if not one.in_backward]
    backwards = [one for one in calls if one.kind is Kind.BACKWARD]
    is_repeated = _is_repeated(made, len(backwards))
    if not backwards or not (is_repeated or any(one.change is not None for one in made)):
        return []
    found: dict[CodeLine, int] = {}
    for call in made:
        site = _site(call, backwards)
        if site is not None and site != line:
            found[site] = found.get(site, 0) + 1
    is_late = all(one.backwards >= len(backwards) for one in made)
    if is_repeated and is_late and len(found) == 1 and _times(view, rank, next(iter(found))) == 1:
        return []  # what was done twice was done in one call of the helper
    return [PointedLine(site, _note(view, rank, site, line), is_repeated) for site in found]


def _is_repeated(made: Sequence[Call], backwards: int) -> bool:
    """True if something was done before the last backward pass, or twice to one gradient."""
    if any(0 < one.backwards < backwards for one in made):
        return True
    names: list[str] = []
    for call in made:
        about = call.collective or call.change or call
        names += about.names
    return len(names) > len(set(names))


def _site(call: Call, backwards: Sequence[Call]) -> CodeLine | None:
    """The line of the innermost function that made both a backward pass and this call."""
    before = [one for one in backwards if one.backwards < call.backwards]
    for backward in (*reversed(before), *backwards):
        met = meeting_lines(backward, call)
        if met is not None:
            return met[1]
    return None


def _times(view: View, rank: int, site: CodeLine) -> int | None:
    """How often the line ran; None if that is not certain."""
    place = place_of(site.file, site.number)
    return run_lines(view, rank).exact_count(place, place.statement) if place is not None else None


def _note(view: View, rank: int, site: CodeLine, line: CodeLine) -> str:
    """How often the site ran, if that is certain, and where it leads."""
    times = _times(view, rank, site)
    where = f"line {line.number}" if line.file == site.file else "the line below"
    if not times:
        return f"calls what leads to {where}"
    often = "once" if times == 1 else f"{times} times"
    return f"runs {often}, and leads to {where}"


# Where some ranks took another way through the user's code than all others.


def where_they_part(view: View, ranks: Sequence[int]) -> PointedLine | None:
    """The first line that only these ranks ran, or the last one before they left the others' way.

    None if their lines do not tell them from all others.
    """
    others = [rank for rank in view.observed.lines_run if rank not in ranks]
    if not others or any(rank not in view.observed.lines_run for rank in ranks):
        return None
    alone = _run_by_all(view, ranks) - _run_by_any(view, others)
    missed = _run_by_all(view, others) - _run_by_any(view, ranks)
    who = ranks_by_number(ranks)
    for line in view.observed.lines_run[ranks[0]]:
        if line in alone:
            return PointedLine(line, f"only {who} came here", is_fault=True)
    known = _run_by_all(view, ranks)
    way = view.observed.lines_run[others[0]]
    for before, line in pairwise(way):
        if line in missed and before in known:
            return PointedLine(before, f"{who} did not go on from here", is_fault=True)
    return None


def _run_by_all(view: View, ranks: Sequence[int]) -> set[CodeLine]:
    ran = [set(view.observed.lines_run[rank]) for rank in ranks]
    return set.intersection(*ran)


def _run_by_any(view: View, ranks: Sequence[int]) -> set[CodeLine]:
    return set[CodeLine]().union(*(view.observed.lines_run[rank] for rank in ranks))


# The lines of the user's code that the ranks ran differently often.

MOST_NUMBERS = 6


def lines_run_unevenly(view: View) -> list[PointedLine]:
    """The lines that not all ranks ran equally often, in the order in which they ran first."""
    counts: dict[CodeLine, dict[int, int]] = {}
    for rank, seen in sorted(view.observed.by_rank.items()):
        for line, times in (seen.trace.times_run or {}).items():
            counts.setdefault(line, {})[rank] = times
    ranks = sorted(view.observed.by_rank)
    found = []
    for line, by_rank in counts.items():
        times_by_rank = [by_rank.get(rank, 0) for rank in ranks]
        if len(set(times_by_rank)) == 1:
            continue
        place = place_of(line.file, line.number)
        note = "the ranks do not run it equally often"
        run = run_lines(view, next(rank for rank in ranks if by_rank.get(rank)))
        if place is not None and run.exact_count(place, place.statement) is not None:
            shown = ", ".join(map(str, times_by_rank[:MOST_NUMBERS]))
            note = f"runs {shown}{', ...' if len(ranks) > MOST_NUMBERS else ''} times, by rank"
        found.append(PointedLine(line, note))
    return found
