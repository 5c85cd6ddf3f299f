"""Tries small edits of a step without a known cause, and keeps those that repair it."""

from __future__ import annotations

import ast
import linecache
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.case import settings
from ddp_equivalence.case.edit import Edit, EditKind
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.diagnosis.repairs import of_calls, of_expressions, of_statements
from ddp_equivalence.diagnosis.repairs.over_ranks import Change, EditSite, Rule
from ddp_equivalence.diagnosis.repairs.source import (
    FileFacts,
    SourceFile,
    Values,
    editable_nodes,
    scope_of,
)
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.time_left import EDITS, TimeLeft
from ddp_equivalence.diagnosis.view import expected_of
from ddp_equivalence.diagnosis.whereabouts.find_whereabouts import unless_it_fails
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.edited_code import (
    CannotEdit,
    EditedCode,
    kept_inside,
    run_as_edited,
)
from ddp_equivalence.measurement.observer import LocalsSeen
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.trials import holding, try_edits
from ddp_equivalence.reference import big_batch

# Tries small edits of a step whose difference has no known cause, and keeps those that repair it.
#
# The idea is that of mutation-based fault localisation (Papadakis and Le Traon, "Metallaxis-FL:
# mutation-based fault localization", 2015): a line is suspicious if a change of it changes the
# result. Here the change must make every gradient that of the big batch.

NEAR = 2
"""Lines at this distance from one that the report points at are tried soon after it."""

PER_TIER = 8
"""A line that is less suspicious by one tier is worth as much as an edit that is less likely by so
many places in the table of rules."""

SHARED = 1
"""A line that computes the big batch, too, is less suspicious by so many tiers."""

LATER_IF_BROAD = 2
"""An edit of a broad kind is tried as late as one of a line that is so many tiers further away."""

RELATIVE = 1e-9
"""Gradients of the big batch in float64 are others if they differ by more than this, relative to
the largest element."""

TIMES_IN_A_PROCESS = 6
"""A process spends so many times the seconds of one check on trials, however many checks differ."""

PART_TO_VERIFY = 0.5
"""So much more, as a part of the seconds of trials, may be spent on whether right edits leave the
big batch as it is."""

NOTHING_TO_EDIT = "no edit of a line that was seen to run could be made within the time"

ALL_SPENT = "earlier checks of this process have taken all the time that it may spend on them"

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


_spent = 0.0


def find_repairs(
    request: Request,
    expected: Expected,
    pointed: Callable[[], Sequence[PointedLine] | None],
    time: TimeLeft,
) -> Repairs:
    """Try edits of the lines that the step runs. An edit of a line that computes the big batch,
    too, must not change that.

    ``pointed``: gives the lines that the report points at without this, which are edited first, or
    None if none may be. ``time``: what explaining the difference may take; half of it may be used.
    """
    global _spent
    most = settings.current().trial_seconds
    unspent = TIMES_IN_A_PROCESS * most - _spent
    seconds = min(most, unspent, time.seconds / 2)
    is_users = request.strategy is None and not request.plant  # a planted fault is in no line
    if not is_users or request.in_process or not request.second_look or not most:
        return Repairs()
    if unspent <= 0:
        return Repairs(why_not=ALL_SPENT)
    if seconds <= 0:
        time.leave_out(EDITS)
        return Repairs()
    began = monotonic()
    try:
        with time.counted(EDITS):
            return unless_it_fails(
                lambda: _unless_it_cannot_run(
                    lambda: _found(request, expected, pointed(), seconds, time.show)
                ),
                lambda why: Repairs(why_not=why),
            )
    finally:
        _spent += monotonic() - began


def _unless_it_cannot_run(find: Callable[[], Repairs]) -> Repairs:
    """What ``find()`` returns, or why this machine or this case allows no trials."""
    try:
        return find()
    except BadCase as error:
        return Repairs(why_not=str(error).partition("\n")[0])


def _found(
    request: Request,
    expected: Expected,
    pointed: Sequence[PointedLine] | None,
    seconds: float,
    show: Callable[[str], object],
) -> Repairs:
    if pointed is None:
        return Repairs()
    expected.batches()  # raises BadCase for a batch that is another one at each call
    of_the_case = lines_of_the_big_batch(request)
    proposals: list[tuple[Edit, bytes]] = []

    def propose(seen: LocalsSeen) -> list[EditedCode]:
        found = []
        for edit, source in _in_order(of_the_case or {}, seen, pointed):
            code = edited_code(edit, source)
            if code is not None:
                found.append(code)
                proposals.append((edit, source))
        return found

    tried = try_edits(
        request,
        expected,
        propose,
        lambda number: proposals[number][0].kind not in BROAD,
        seconds,
        show,
    )
    codes = {n: code for n in tried.right if (code := edited_code(*proposals[n])) is not None}
    until = monotonic() + PART_TO_VERIFY * seconds
    numbers = sorted(codes, key=lambda number: _is_broad(proposals[number]))
    right: list[int] = []
    unknown = 0
    for number in numbers:
        edit, source = proposals[number]
        if right and monotonic() > until and may_change(edit, source, of_the_case):
            unknown += 1
        elif not may_change(edit, source, of_the_case) or leaves_the_big_batch(
            request, expected, edit, source
        ):
            right.append(number)
    right = in_general(request, expected, codes, right, monotonic() + seconds)
    repairs = [repair_of(*proposals[number]) for number in right]
    why_not = tried.why_not or ("" if tried.count else NOTHING_TO_EDIT)
    count = tried.count - unknown
    return Repairs(_first_of_each_line(repairs), len(repairs), count, tried.of, why_not)


def _is_broad(proposal: tuple[Edit, bytes]) -> bool:
    return proposal[0].kind in BROAD


def _in_order(
    of_the_case: Mapping[str, set[int]], seen: LocalsSeen, pointed: Sequence[PointedLine]
) -> list[tuple[Edit, bytes]]:
    found: list[tuple[int, int, Edit, bytes]] = []
    for file, lines in seen.lines.items():
        text = "".join(linecache.getlines(file))
        shared = of_the_case.get(file, set())
        try:
            edits = edits_of(file, text, lines, _values(file, text, seen))
        except (SyntaxError, ValueError):
            continue
        source = text.encode()
        tier = partial(_tier, pointed)
        for number, edit in enumerate(edits):
            tiers = tier(file, edit.line) + SHARED * (edit.line in shared)
            tiers += LATER_IF_BROAD * (edit.kind in BROAD)
            cost = PER_TIER * tiers + LIKELINESS[edit.kind]
            found.append((cost, number, edit, source))
    return [(edit, source) for *_, edit, source in sorted(found, key=lambda one: one[:2])]


def _tier(pointed: Sequence[PointedLine], file: str, line: int) -> int:
    """0 for a line that the report marks, and more the further away a line is from such lines."""
    tiers = [4]
    for one in pointed:
        if one.line.file == file:
            away = abs(one.line.number - line)
            if away == 0:
                tiers.append(0 if one.is_fault else 1)
            elif away <= NEAR:
                tiers.append(2)
            else:
                tiers.append(3)
    return min(tiers)


def may_change(edit: Edit, source: bytes, of_the_case: Mapping[str, set[int]] | None) -> bool:
    """False if the big batch runs nothing of the code that is replaced with this edit.

    ``of_the_case``: the lines that it runs; None if they are not known.
    """
    code = edited_code(edit, source)
    assert code is not None
    if of_the_case is None:
        return True
    replaced = range(code.first_line, code.first_line + code.before.count("\n") + 1)
    return not of_the_case.get(edit.file, set()).isdisjoint(replaced)


def leaves_the_big_batch(request: Request, expected: Expected, edit: Edit, source: bytes) -> bool:
    """True if the big batch has the same gradients with this edit: it is right by definition."""
    code, case, right = edited_code(edit, source), request.case, expected.reference.expected
    assert code is not None
    try:
        edited = run_as_edited(code, (case.model, case.batch, case.loss))
        with without_planted_faults(), kept_inside(other_threads=False), edited:
            found = big_batch(case, request.compare, request.training, request.steps).expected
    except CannotEdit:  # the big batch has nothing to do with these functions
        return True
    except Exception:
        return False
    return found.keys() == right.keys() and all(
        _close(one, right[key]) for key, one in found.items()
    )


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    one, other = one.to_dense(), other.to_dense()
    largest = float(other.abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=RELATIVE * largest)


def lines_of_the_big_batch(request: Request) -> Mapping[str, set[int]] | None:
    """File -> the lines of the user's code that compute the gradients of the big batch.

    None if somebody else traces this thread, such as a debugger, so that they are not known.
    """
    if sys.gettrace() is not None:
        return None
    seen = LocalsSeen()
    with without_planted_faults(), seen.watching():
        big_batch(request.case, request.compare, request.training, request.steps)
    return seen.lines


def _values(file: str, text: str, seen: LocalsSeen) -> dict[int, Mapping[str, str]]:
    """The line of each ``def`` -> the descriptions of its local names."""
    found: dict[int, Mapping[str, str]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS) and (file, _first_line(node)) in seen.values:
            found[node.lineno] = seen.values[file, _first_line(node)]
    return found


def edited_code(edit: Edit, source: bytes) -> EditedCode | None:
    """The statement at the top of the file that holds the edit; None if it does not hold it all."""
    lines = source.splitlines(keepends=True)
    for statement in _statements(source):
        first, last = _first_line(statement), statement.end_lineno or statement.lineno
        start = sum(map(len, lines[: first - 1]))
        end = start + sum(map(len, lines[first - 1 : last]))
        if start <= edit.start and edit.end <= end:
            after = source[start : edit.start] + edit.text.encode() + source[edit.end : end]
            before = source[start:end].decode()
            return EditedCode(edit.file, first, before, after.decode(), edit.line)
    return None


@lru_cache(maxsize=8)
def _statements(source: bytes) -> list[ast.stmt]:
    return ast.parse(source.decode()).body  # as text, or a line that names its coding would count


def _first_line(statement: ast.stmt) -> int:
    """The line of a statement, or of its first decorator."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(int(one.lineno) for one in decorators)])


def _first_of_each_line(repairs: Sequence[Repair]) -> tuple[Repair, ...]:
    first: dict[CodeLine, Repair] = {}
    for one in sorted(repairs, key=lambda one: one.is_broad):
        first.setdefault(one.line, one)
    return tuple(first.values())


# An edit of the user's code with which every rank was seen to hold the big batch's gradients.

LONGEST = 60
"""Longer code is cut."""

WHOLE_STATEMENTS = {
    EditKind.STATEMENT_LEFT_OUT: "without this statement",
    EditKind.STATEMENTS_SWAPPED: "with this statement behind the next one",
    EditKind.MOVED_OUT: "with this, and all below it in its block, behind the block",
    EditKind.CONTEXT_LEFT_OUT: "without this `with`",
}
"""Edits that are easier said than shown."""


BROAD = frozenset(
    {
        EditKind.ARGUMENTS_SWAPPED,
        EditKind.CONDITION,
        EditKind.CONSTANT,
        EditKind.CONTEXT_LEFT_OUT,
        EditKind.MOVED_OUT,
        EditKind.OVER_WORLD_SIZE,
        EditKind.REDUCED,
        EditKind.STATEMENT_LEFT_OUT,
        EditKind.STATEMENTS_SWAPPED,
        EditKind.TENSORS_OF_MODULE,
        EditKind.TIMES_WORLD_SIZE,
    }
)
"""Edits that often repair a step at another line than the faulty one: what leaves out the part that
has the fault, or scales it away, is right as well. Of the steps s161 to s200 in tests/faulty_steps,
these kinds repaired 8 at the faulty line and 22 elsewhere, all others 30 and 12 (each kind counted
once a step; a record of 2026-11-23). A condition that is turned round, and other tensors of a
module, were added later: they leave out what has the fault in the same way.
"""


@dataclass(frozen=True)
class Repair:
    """``before``, ``after``: the code that was replaced, and what stood there instead."""

    line: CodeLine
    before: str
    after: str
    kind: EditKind

    @property
    def is_broad(self) -> bool:
        """True for an edit that may repair the step although the fault is elsewhere."""
        return self.kind in BROAD

    @property
    def text(self) -> str:
        """The change, as part of a sentence: ``with `a - b` in place of `a + b` ``."""
        if self.kind in WHOLE_STATEMENTS:
            return WHOLE_STATEMENTS[self.kind]
        before = _on_one_line(self.before)
        if not self.after.strip():
            return f"without `{before.strip(', ')}`"
        return f"with `{_on_one_line(self.after)}` in place of `{before}`"


@dataclass(frozen=True)
class Repairs:
    """What the trials of edits have shown: ``found``, one for each line, the most likely first:
    those that are not broad, and of equal ones the first that was tried.

    ``right``: how many edits repair the step, several of one line among them. ``tried``: how many
    were tried, ``of`` so many. ``why_not``: why none was tried.
    """

    found: tuple[Repair, ...] = ()
    right: int = 0
    tried: int = 0
    of: int = 0
    why_not: str = ""

    @property
    def shows_the_fault(self) -> bool:
        """True if an edit was found that is not broad."""
        return bool(self.found) and not self.found[0].is_broad

    @property
    def fix(self) -> str:
        """Which edit repairs the step, and how many were tried; "" if none was found."""
        if not self.found:
            return ""
        first = self.found[0]
        if first.is_broad:
            what = f"the change of line {first.line.number} that was tried repairs the step"
            return f"{what}, but it may only leave out what is wrong elsewhere"
        change = f"make the change of line {first.line.number} that was tried, or one like it"
        # Some of the others hung, or were given up: of them it is not known.
        return f"{change}; {self.right} of {self.tried} changes tried repaired it"


def lines_of_repairs(repairs: Repairs) -> Iterator[PointedLine]:
    """The lines that were edited, for a report; the first is the most likely one."""
    for number, one in enumerate(repairs.found):
        note = f"tried: all gradients right {one.text}"
        yield PointedLine(one.line, note, is_fault=number == 0 and not one.is_broad)


def repair_of(edit: Edit, source: bytes) -> Repair:
    """``source``: the file before the edit."""
    before = source[edit.start : edit.end].decode()
    return Repair(CodeLine(edit.file, edit.line), before, edit.text, edit.kind)


def _on_one_line(code: str) -> str:
    text = " ".join(code.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


# Whether an edit repairs the step for good, or only hides what is wrong in this one case.

MOST_RANKS = 8
"""The other layout on which an edit must be right has no more."""


def in_general(
    request: Request,
    expected: Expected,
    codes: Mapping[int, EditedCode],
    right: Sequence[int],
    until: float,
) -> list[int]:
    """Those of the right edits that repair the step on another layout with another seed as well:
    `rank == 1` -> `rank > 1` repairs two ranks only.
    """
    other = _elsewhere(request, expected)
    try:
        return [*holding(other, expected_of(other), codes, right, until)]
    except BadCase:  # this case cannot be split over other ranks
        return [*right]


def _elsewhere(request: Request, expected: Expected) -> Request:
    """The request on another layout, if the case allows one, and with another seed."""
    case, size = request.case, request.case.ranks.world_size
    sizes = (2 * size, size // 2, size + 1) if request.lane.device_type == "cpu" else (size // 2,)
    examples = expected.reference.examples
    for other in sizes if isinstance(case.shards, str) and "+" not in case.shards else ():
        if 1 < other <= MOST_RANKS and not any(count % other for count in examples):
            nodes = 2 if case.ranks.nodes == 1 and other % 2 == 0 else 1
            case = replace(case, layout=f"{nodes}x{other // nodes}")
            break
    return replace(request, case=replace(case, seed=case.seed + 1))


# All small edits of some lines of a file that may repair a step.

WANTED = re.compile(r"clip_grad\w*|dropout\w*|penalt\w*|regulari\w*|weight_decay", re.IGNORECASE)
"""Names of what is in a step because somebody wants it, whatever gradients it leaves."""


def edits_of(
    file: str, source: str, lines: Collection[int], values: Values | None = None
) -> list[Edit]:
    """All edits of expressions and statements that begin on one of these lines.

    ``source`` is the file's bytes decoded as utf-8, with the line ends as they are. Each edit
    gives other syntax that compiles, and no two give the same. They are ordered by line, and
    those of a line as in the table of rules: the most likely first.

    ``values`` says what the local names of functions held in a run: for the line of a function's
    ``def``, each name with a description of its value, such as "tensor float 3x4" or "int". A
    name is then exchanged only for another with the same description.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of code that an edit makes strange
        try:
            parsed = SourceFile(file, source)
        except (SyntaxError, ValueError):
            return []  # what was run is not what the file holds now
        parts = {top: _Part(parsed, top) for top in parsed.tree.body}
        proposed = sorted(_proposed(parsed, lines, values or {}), key=_by_line_and_likeliness)
        return [
            Edit(file, one.line, one.change.start, one.change.end, one.change.text, one.kind)
            for one in proposed
            if keeps_what_is_wanted(parsed, one.change) and parts[one.top].becomes_new(one.change)
        ]


def keeps_what_is_wanted(source: SourceFile, change: Change) -> bool:
    """False for a change that takes away what somebody wrote on purpose, or puts it elsewhere."""
    before = Counter(WANTED.findall(source.between(change.start, change.end)))
    return not before - Counter(WANTED.findall(change.text))


@dataclass(frozen=True)
class _Proposed:
    """A change of what begins on a line, in one statement of the module."""

    line: int
    kind: EditKind
    change: Change
    top: ast.stmt


def _by_line_and_likeliness(proposed: _Proposed) -> tuple[int, int]:
    return proposed.line, LIKELINESS[proposed.kind]


def _proposed(source: SourceFile, lines: Collection[int], values: Values) -> Iterator[_Proposed]:
    facts = FileFacts(source)
    for node in editable_nodes(source.tree):
        line: int = getattr(node, "lineno", 0)
        if line not in lines or isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            continue
        rules = [rule for rule in RULES if isinstance(node, rule.nodes)]
        scope = scope_of(node, source, values) if rules else None
        if scope is None:
            continue
        top = [one for one in (node, *source.parents_of(node)) if isinstance(one, ast.stmt)][-1]
        for rule in rules:
            for change in rule.changes(node, EditSite(source, facts, scope)):
                yield _Proposed(line, rule.kind, change, top)


class _Part:
    """One statement of the module. An edit in it is compiled without the rest of the file."""

    def __init__(self, source: SourceFile, statement: ast.stmt) -> None:
        decorators = getattr(statement, "decorator_list", [])
        self._source = source
        first = source.span(decorators[0] if decorators else statement)[0]
        self._start = source.raw.rindex(b"@", 0, first) if decorators else first
        self._end = source.span(statement)[1]

    @cached_property
    def _seen(self) -> set[str]:
        return {ast.dump(ast.parse(self._source.between(self._start, self._end)))}

    def becomes_new(self, change: Change) -> bool:
        """True if the change gives syntax that compiles, and that was not seen before."""
        before = self._source.between(self._start, change.start)
        after = self._source.between(change.end, self._end)
        text = f"{before}{change.text}{after}"
        try:
            tree = ast.parse(text)
            compile(tree, self._source.file, "exec")
        except (SyntaxError, ValueError):
            return False
        dumped = ast.dump(tree)
        is_new = dumped not in self._seen
        self._seen.add(dumped)
        return is_new


# All kinds of edits, those first of which fewest had to be made for each step that they repaired.
#
# The order was found on 200 faulty steps whose faulty line is known (`tests/faulty_steps`). All
# edits of this line were run. For each kind, the number of steps that it repaired there, where a
# step that several kinds repair counts half for each of them and half in shares, was divided by
# the number of edits of this kind that all lines of a step have. Both were moved a little towards
# what an unknown kind is expected to have (0.3 repairs in 200 steps, and 0.15 edits in a step),
# so that one lucky repair decides little. In the order below the ratio falls from 20 to 0.
#
# Kinds that repaired none of the 240 steps, once an edit had to hold on another layout as well,
# or none that another kind does not repair too, were taken out on 2026-11-27, but for those that
# change any code, as in mutation testing: operators, conditions, slices, arguments, results.
#
# To add a kind: write a function that proposes changes for a type of node, in the file of its
# topic, and put it into this table. Its docstring says why people make the mistake.

RULES: tuple[Rule[Any], ...] = (
    Rule(EditKind.AFTER_REDUCTION, ast.Call, of_statements.addend_outside),
    Rule(EditKind.AFTER_REDUCTION, ast.Assign, of_statements.addend_after),
    Rule(EditKind.AFTER_REDUCTION, ast.Assign, of_statements.limited_after),
    Rule(EditKind.VARIANCE_OF_ALL, ast.Call, of_statements.around_mean_of_all),
    Rule(EditKind.ROUNDED_UP, ast.BinOp, of_expressions.rounded_up),
    Rule(EditKind.DOT_ADDED, ast.Call, of_calls.dot_behind_a_prefix),
    Rule(EditKind.OPTION_GIVEN, ast.Call, of_calls.optional_argument),
    Rule(EditKind.TIMES_ARGUMENT, ast.expr, of_expressions.times_an_argument),
    Rule(EditKind.JUMP, ast.stmt, of_statements.jump),
    Rule(EditKind.BOTH_BOUNDS, ast.Compare, of_expressions.both_bounds),
    Rule(EditKind.BEFORE_SKIPPED, ast.Continue, of_statements.before_skipped),
    Rule(EditKind.MEAN_OF_ALL, ast.Call, of_calls.mean_over_all),
    Rule(EditKind.ONLY_THESE, ast.Expr, of_statements.only_these_parameters),
    Rule(EditKind.HOOKS, ast.Expr, of_statements.hooks_replaced),
    Rule(EditKind.REQUIRES_GRAD, ast.Call, of_expressions.requires_grad),
    Rule(EditKind.SHARE_OF_A_TURN, ast.expr, of_calls.share_of_a_turn),
    Rule(EditKind.ORDER_OF_PARTS, ast.Call, of_calls.parts_joined),
    Rule(EditKind.ORDER_OF_PARTS, ast.Subscript, of_calls.part_of_each),
    Rule(EditKind.OFFSET, ast.Call, of_expressions.offset_of_the_rank),
    Rule(EditKind.OFFSET, ast.expr, of_expressions.rank_times_count),
    Rule(EditKind.OFFSET, ast.Call, of_expressions.diagonal_of_the_rank),
    Rule(EditKind.OFFSET, ast.Call, of_expressions.counted_from_the_rank),
    Rule(EditKind.CONTEXT_LEFT_OUT, ast.With, of_statements.context_left_out),
    Rule(EditKind.CONDITION, ast.BoolOp, of_expressions.and_or),
    Rule(EditKind.CONDITION, ast.stmt, of_statements.condition_of_block),
    Rule(EditKind.LISTS_JOINED, ast.For, of_statements.other_list_too),
    Rule(EditKind.CONDITION_LEFT_OUT, ast.BoolOp, of_expressions.condition_left_out),
    Rule(EditKind.INDEX, ast.Subscript, of_expressions.index_off_by_one),
    Rule(EditKind.AXES, ast.Call, of_expressions.sizes_swapped),
    Rule(EditKind.COMPARISON, ast.Compare, of_expressions.another_comparison),
    Rule(EditKind.PERMUTATION_INVERTED, ast.Subscript, of_expressions.permutation_inverted),
    Rule(EditKind.MIRRORED, ast.Slice, of_expressions.mirrored),
    Rule(EditKind.METHOD, ast.Attribute, of_calls.mixed_up),
    Rule(EditKind.METHOD, ast.Name, of_calls.mixed_up_name),
    Rule(EditKind.METHOD, ast.Call, of_calls.function_for_method),
    Rule(EditKind.TENSORS_OF_MODULE, ast.Call, of_calls.tensors_of_a_module),
    Rule(EditKind.WITH_GRADIENT, ast.Expr, of_statements.reduced_with_gradient),
    Rule(EditKind.IN_PLACE, ast.Attribute, of_calls.in_place),
    Rule(EditKind.ADDED_UP, ast.Assign, of_statements.added_up),
    Rule(EditKind.ADDED_UP, ast.AugAssign, of_statements.assigned),
    Rule(EditKind.ADDED_UP, ast.AugAssign, of_statements.equal_indices_added),
    Rule(EditKind.DIVISOR, ast.expr, of_expressions.another_divisor),
    Rule(EditKind.PARENTHESES, ast.BinOp, of_expressions.parentheses_moved),
    Rule(EditKind.ONLY_IF, ast.AugAssign, of_calls.only_if),
    Rule(EditKind.FLAG, ast.Constant, of_expressions.the_other_truth_value),
    Rule(EditKind.MOVED_OUT, ast.stmt, of_statements.moved_out),
    Rule(EditKind.OPERATOR, ast.BinOp, of_expressions.another_operator),
    Rule(EditKind.CALL_BY_NAME, ast.Call, of_expressions.name_for_call),
    Rule(EditKind.RANGE, ast.Call, of_expressions.range_off_by_one),
    Rule(EditKind.OWN_ATTRIBUTE, ast.Attribute, of_expressions.another_attribute),
    Rule(EditKind.MASKED_TOO, ast.expr, of_calls.masked_too),
    Rule(EditKind.SLICE, ast.Slice, of_expressions.another_slice),
    Rule(EditKind.SLICE, ast.Compare, of_expressions.shifted_too),
    Rule(EditKind.SLICE, ast.Call, of_expressions.shifted_call),
    Rule(EditKind.STATEMENT_LEFT_OUT, ast.stmt, of_statements.left_out),
    Rule(EditKind.ATTRIBUTE_LEFT_OUT, ast.Attribute, of_expressions.attribute_left_out),
    Rule(EditKind.COUNT_OF_ALL, ast.BinOp, of_calls.count_of_all),
    Rule(EditKind.KEYWORD_LEFT_OUT, ast.Call, of_calls.keyword_left_out),
    Rule(EditKind.STATEMENTS_SWAPPED, ast.stmt, of_statements.swapped),
    Rule(EditKind.CALL_LEFT_OUT, ast.Call, of_calls.call_left_out),
    Rule(EditKind.OPERAND_LEFT_OUT, ast.BinOp, of_expressions.operand_left_out),
    Rule(EditKind.KEYWORD_ADDED, ast.Call, of_calls.keyword_added),
    Rule(EditKind.FUNCTION_APPLIED, ast.expr, of_expressions.function_applied),
    Rule(EditKind.FUNCTION_APPLIED, ast.Call, of_expressions.function_applied_to_all),
    Rule(EditKind.SUBSCRIPT_LEFT_OUT, ast.Subscript, of_expressions.subscript_left_out),
    Rule(EditKind.STRING, ast.Constant, of_expressions.another_string),
    Rule(EditKind.REDUCED, ast.stmt, of_statements.reduced),
    Rule(EditKind.NAME, ast.Name, of_expressions.another_name),
    Rule(EditKind.CLONED, ast.expr, of_expressions.cloned),
    Rule(EditKind.RESULT_USED, ast.Expr, of_statements.result_used),
    Rule(EditKind.RESULT_USED, ast.stmt, of_statements.returned),
    Rule(EditKind.OPERANDS_SWAPPED, ast.BinOp, of_expressions.operands_swapped),
    Rule(EditKind.TIMES_WORLD_SIZE, ast.expr, of_expressions.multiplied_by_world_size),
    Rule(EditKind.SIGN, ast.UnaryOp, of_expressions.sign_left_out),
    Rule(EditKind.OVER_WORLD_SIZE, ast.expr, of_expressions.divided_by_world_size),
    Rule(EditKind.CONSTANT, ast.Constant, of_expressions.another_number),
    Rule(EditKind.ARGUMENTS_SWAPPED, ast.Call, of_calls.arguments_swapped),
    Rule(EditKind.ARGUMENT_LEFT_OUT, ast.Call, of_calls.argument_left_out),
    Rule(EditKind.DETACHED, ast.expr, of_expressions.detached),
)

LIKELINESS = {kind: number for number, kind in enumerate(dict.fromkeys(one.kind for one in RULES))}
"""The place of each kind of edit, the most likely first."""
