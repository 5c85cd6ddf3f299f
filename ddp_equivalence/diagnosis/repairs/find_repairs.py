"""Tries small edits of a step whose difference has no known cause, and keeps those that repair it.

The idea is that of mutation-based fault localisation (Papadakis and Le Traon, "Metallaxis-FL:
mutation-based fault localization", 2015): a line is suspicious if a change of it changes the
result. Here the change must make every gradient that of the big batch.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from time import monotonic

import torch
from torch import Tensor

from ddp_equivalence.case import settings
from ddp_equivalence.case.edit import Edit
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.comparison.expected import Expected
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.repairs.edits import edits_of
from ddp_equivalence.diagnosis.repairs.in_general import in_general
from ddp_equivalence.diagnosis.repairs.repair import BROAD, Repair, Repairs, repair_of
from ddp_equivalence.diagnosis.repairs.rules import LIKELINESS
from ddp_equivalence.diagnosis.time_left import EDITS, TimeLeft
from ddp_equivalence.diagnosis.whereabouts.own_errors import unless_it_fails
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.edited_code import CannotEdit, EditedCode, run_as_edited
from ddp_equivalence.measurement.kept_inside import kept_inside
from ddp_equivalence.measurement.locals_seen import LocalsSeen
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.trials import try_edits
from ddp_equivalence.reference import big_batch

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
