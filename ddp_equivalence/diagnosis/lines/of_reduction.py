"""The lines of a reduction: what it reduces, how often, for whom, and where its result goes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ddp_equivalence.diagnosis.lines.decisions import conditions, decisions
from ddp_equivalence.diagnosis.lines.of_loss import line_that_scales_loss
from ddp_equivalence.diagnosis.lines.origins import (
    Origin,
    chosen,
    divisors,
    gone_through,
    line_of_compared,
    made_of,
    of_line,
)
from ddp_equivalence.diagnosis.lines.source import (
    LOOPS,
    RunLines,
    SourceLine,
    called_name,
    place_at,
    place_of,
    run_lines,
)
from ddp_equivalence.diagnosis.lines.words import scaling_text
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind

# The lines at which gradients are reduced, and those that multiply them by a number.

SAME = 1e-3
"""Gradients have a common factor if this much of them, relative to their norm, has not."""


def by_hand(view: View) -> list[CallSite]:
    """The lines of the user's own code that reduce gradients outside a backward pass."""
    return [place for place in view.observed.calls.reductions if not place.first.in_backward]


def in_hook(view: View) -> list[CallSite]:
    """The lines that reduce gradients inside a communication hook, or that register the hook.

    A hook of torch itself has no line of the user's, so the line that registers it stands for it.
    """
    calls = view.observed.calls
    backwards = {place.line for place in calls.backwards}
    in_backward = [
        place
        for place in calls.reductions
        if place.first.in_backward and place.line not in backwards
    ]
    return in_backward or calls.places(Kind.HOOK)


def hook_was_registered(view: View) -> bool:
    """True if DDP was given a communication hook. Tensors have hooks of their own."""
    return bool(view.observed.calls.places(Kind.HOOK))


def ddp_reduces(view: View) -> bool:
    """True if DDP was to reduce gradients in the last backward pass, without a hook."""
    synchronises = any(wrapper.synchronised[-1:] == (True,) for wrapper in view.observed.wrappers)
    return synchronises and not hook_was_registered(view)


def is_unseen(view: View) -> bool:
    """True if it was not seen what reduces the gradients, such as FSDP or this package."""
    return not (by_hand(view) or in_hook(view) or ddp_reduces(view))


def line_of_reduction(
    view: View, note: Callable[[str], str] = str, is_fault: bool = False, missing: str = ""
) -> PointedLine | None:
    """The last line at which gradients are reduced; None if none was seen.

    ``note`` gets what was seen to happen there, and returns what the report says of it.
    """
    for place in (by_hand(view) or in_hook(view))[-1:]:
        over = f"over {max(map(len, place.groups), default=0)} ranks"
        seen = f"{len(place.calls)} {_operation(place)}, {over}"
        if place.kind is Kind.HOOK:
            seen = hook_text(place)
        elif place.first.in_backward:
            where = "in the communication hook" if hook_was_registered(view) else "during backward"
            seen = f"{_operation(place)} {over}, {where}"
        return place.pointed(note(seen), is_fault, missing)
    for place in view.observed.calls.backwards[-1:] if ddp_reduces(view) else ():
        logged = [wrapper.logged.get("world_size") for wrapper in view.observed.wrappers]
        ranks = min([size for size in logged if isinstance(size, int)], default=view.world_size)
        return place.pointed(note(f"DDP averages over {ranks} ranks here"), is_fault, missing)
    return None


def line_that_scales_gradients(view: View, factor: float) -> PointedLine | None:
    """The last line that multiplies gradients by this number; None if none was seen."""
    for place in view.observed.calls.multiplied_by(factor)[-1:]:
        what = "the gradient" if len(place.names) == 1 else f"{len(place.names)} gradients"
        return place.pointed(scaling_text(what, factor), True)
    return None


def line_that_scales(view: View, factor: float) -> PointedLine | None:
    """The line that multiplies gradients or the loss by this number; None if none was seen."""
    return line_that_scales_gradients(view, factor) or line_that_scales_loss(view, factor)


def averages(view: View) -> bool:
    """True if the reduction itself divides by the number of ranks: DDP without a hook, or AVG."""
    if by_hand(view):
        return _operation(by_hand(view)[-1]).endswith("AVG")
    return ddp_reduces(view)


def common_factor(view: View) -> float | None:
    """The number that all gradients on all ranks are multiplied by; None if it is not the same."""
    factor = view.measured.factor
    if not factor:
        return None
    rest = (view.measured.by_rank - factor * view.expected_by_rank).norm()
    is_common = float(rest) <= SAME * float(view.measured.by_rank.norm())
    return factor if is_common else None


def hook_text(place: CallSite) -> str:
    """What a line does that registers a communication hook."""
    return f"gives DDP a communication hook, {place.first.what}"


def _operation(place: CallSite) -> str:
    collective = place.first.collective
    return "" if collective is None else f"{collective.op} {collective.reduce_op}".strip()


# The lines around a reduction that decided what it reduces, how often it runs, and for whom.


def way_to(view: View, call: Call) -> tuple[CodeLine, ...]:
    """The line that made a call and those that led to it, the innermost first, up to the function
    that called backward; of a call in a hook, only those of the hook.
    """
    line = call.at
    if line is None:
        return ()
    backward = {one.line for one in view.observed.calls.backwards}
    functions = {(one.file, one.function) for one in backward}
    way: list[CodeLine] = []
    for one in (line, *call.callers):
        if one in backward:
            break
        way.append(one)
        if (one.file, one.function) in functions:
            break
    return tuple(way)


def lines_that_left_out(view: View, place: CallSite) -> list[PointedLine]:
    """The line that kept some gradients from being reduced at this place; [] if none was seen.

    The first of these that was seen: a line that left the loop, a condition that was not always the
    same, a line that skipped the rest of a pass, and the line that made what the loop goes through.
    """
    run = run_lines(view, place.ranks[0])
    way = way_to(view, place.first)
    decided = decisions(run, way)
    for kind in ("left", "condition", "skipped"):
        for one in decided:
            if one.what == kind:
                return [*line_of_compared(run, one.test, one.line), one.pointed()]
    link = chosen(gone_through(run, way))
    if link is None:
        return lines_that_made(run, place, way[1:])
    note = f"makes {link.name}, which the loop goes through"
    note = note if link.name else "chooses what the loop goes through"
    return [PointedLine(link.line, note, True)] if link.line != place.line else []


def lines_that_made(
    run: RunLines, place: CallSite, callers: Sequence[CodeLine] = (), is_fault: bool = True
) -> list[PointedLine]:
    """The line that made the tensor which a collective was given, or what it was made of."""
    made_at = place.first.made_at
    if made_at is None or made_at == place.line:
        return []
    made = chosen(of_line(run, made_at, callers))
    if made is None or made.line in (made_at, place.line):
        note = f"makes the tensor that line {place.line.number} is given"
        return [PointedLine(made_at, note, is_fault)]
    note = f"gives {made.name}, of which line {made_at.number} is made"
    return [PointedLine(made.line, note, is_fault)]


def lines_of_no_sync(view: View) -> list[PointedLine]:
    """The line that decided that ``no_sync`` is entered, or else the line that enters it."""
    for place in view.observed.calls.places(Kind.NO_SYNC)[-1:]:
        run, at = run_lines(view, place.ranks[0]), place_at(place.line)
        decision = next(conditions(run, at), None) if at is not None else None
        if decision is not None:
            return [decision.pointed(), place.pointed("no synchronisation inside")]
        made = _context_made(run, at)
        return [
            *(PointedLine(one, "chooses whether DDP synchronises", True) for one in made),
            place.pointed("no synchronisation inside", is_fault=not made),
        ]
    return []


def _context_made(run: RunLines, place: SourceLine | None) -> Sequence[CodeLine]:
    """The line that chose the context which a ``with`` enters by name."""
    if place is None or not isinstance(place.statement, (ast.With, ast.AsyncWith)):
        return ()
    for item in place.statement.items:
        expression = item.context_expr
        if isinstance(expression, ast.Call) and not expression.args:
            expression = expression.func
        if isinstance(expression, ast.Name):
            return [one.line for one in made_of(run, Origin(place, expression))][:1]
    return ()


def lines_of_divisor(view: View, rank: int, line: CodeLine) -> list[PointedLine]:
    """The line of a function that made the number by which a line divides or multiplies."""
    found = divisors(run_lines(view, rank), line)
    return [
        PointedLine(one.line, f"sets {one.name}, the number at line {line.number}")
        for one in [one for one in found if one.place.function is not None][-1:]
        if one.line != line
    ]


# Collectives in the user's code that never ran, and what kept them from running.

REDUCING = frozenset(
    {"all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor"}
)

MOST_CALLS_UP = 4


class _Unreached(NamedTuple):
    """``place``: of a call that never ran. ``line``: of the call."""

    place: SourceLine
    line: CodeLine


def lines_that_keep_from_reducing(view: View) -> list[PointedLine]:
    """Why a collective that reduces, in the user's code, never ran after the last backward pass.

    Empty if none is there, or if it is not known why it did not run.
    """
    run = run_lines(view)
    for name in REDUCING:
        for one in _never_run(run, name):
            found = _kept_from(run, one, 0)
            if found:
                return found
    return []


def _calls_of(run: RunLines, name: str) -> Iterator[_Unreached]:
    """All calls of functions of this name, in files that ran."""
    for file, node in run.nodes():
        if isinstance(node, ast.Call) and called_name(node) == name:
            place = place_of(file, node.lineno)
            if place is not None:
                yield _Unreached(place, place.line(node))


def _never_run(run: RunLines, name: str) -> Iterator[_Unreached]:
    return (one for one in _calls_of(run, name) if one.place.function and one.line not in run.times)


def _kept_from(run: RunLines, one: _Unreached, up: int) -> list[PointedLine]:
    place = one.place
    assert place.function is not None
    within = run.last_of(place, place.function.body)
    if within <= run.begun:
        if within or up >= MOST_CALLS_UP:
            return []
        callers = _never_run(run, place.function.name)
        found = (_kept_from(run, caller, up + 1) for caller in callers)
        return next(filter(None, found), [])
    for around in reversed(place.around):  # the outermost that did not go on
        node, body = around.statement, getattr(around.statement, around.branch)
        if not isinstance(node, (ast.If, *LOOPS)):
            continue
        if not run.last_of(place, body) and run.count(place, node):
            return _not_gone_on(run, one, node, around.branch)
    return []


def _not_gone_on(run: RunLines, one: _Unreached, node: ast.stmt, branch: str) -> list[PointedLine]:
    """Why a loop or a condition never went on to a call."""
    line, after = one.place.line(node), f"so line {one.line.number} never runs"
    if isinstance(node, (ast.For, ast.AsyncFor)) and branch == "body":
        made = chosen(made_of(run, Origin(one.place, node.iter)))
        lines = []
        if made is not None and made.line != line:
            what = f"makes {made.name}; " if made.name else ""
            note = f"{what}line {line.number} finds nothing in it"
            lines = [PointedLine(made.line, note, True)]
        return [*lines, PointedLine(line, f"goes through nothing, {after}", not lines)]
    if isinstance(node, ast.While):
        return [PointedLine(line, f"the condition is false at once, {after}", True)]
    body = getattr(node, branch)
    if isinstance(node, ast.If) and body[0].lineno != node.lineno:
        truth = "false" if branch == "body" else "true"
        note = f"always {truth}, {after}"
        return [*line_of_compared(run, node.test, line), PointedLine(line, note, True)]
    return []
