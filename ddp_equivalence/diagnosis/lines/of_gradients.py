"""The lines where gradients are lost, cleared, or kept back."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.hypothesis import ranks_by_number
from ddp_equivalence.diagnosis.lines.decisions import where_they_part
from ddp_equivalence.diagnosis.lines.of_reduction import lines_of_exchange, lines_that_left_out
from ddp_equivalence.diagnosis.lines.origins import lines_behind
from ddp_equivalence.diagnosis.lines.source import (
    FUNCTIONS,
    LOOPS,
    Function,
    RunLines,
    called_name,
    inside,
    place_at,
    run_lines,
)
from ddp_equivalence.diagnosis.lines.words import first_of, last_of
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind

# Lines that compute something from a gradient, and whose result nothing uses.

NO_VALUES = frozenset({"requires_grad", "detach"})
"""Attributes and methods that change no values."""

LATE = "register_post_accumulate_grad_hook"

NEVER = "computes this and drops it; the gradient stays as it is"


def lines_of_dropped_results(view: View) -> list[PointedLine]:
    """The lines of hooks that compute a gradient in vain, or else one that forgets what it makes of
    ``.grad``.
    """
    return (_of_hooks(view) or _of_expressions(view))[:1]


def fix_of_dropped_results(view: View) -> str:
    """Use the result; "" if none was dropped."""
    for place in view.observed.calls.places(Kind.DROPPED):
        for one in _of_hooks(view)[:1]:
            replaces = place.first.names[0] != LATE and place.line == one.line
            what = "return from the hook" if replaces else "write to .grad"
            return f"{what} what line {one.line.number} computes."
    for one in lines_of_dropped_results(view):
        return f"write to .grad what line {one.line.number} computes."
    return ""


def _of_hooks(view: View) -> list[PointedLine]:
    """What hooks computed and did not give back, as far as no later line of theirs reads it."""
    found = []
    for place in view.observed.calls.places(Kind.DROPPED):
        name, by = place.first.what, place.first.names[0]
        if not _is_read_after(place.line, name):
            note = f"computes {name} and returns nothing: the old gradient stays"
            if by == LATE:
                note = f"computes {name} and does not write it to .grad"
            found.append(place.pointed(note, is_fault=True))
    return found


def _is_read_after(line: CodeLine, name: str) -> bool:
    """True if a variable that a line sets may be read later in the same function."""
    place = place_at(line)
    if place is None or place.function is None:
        return True
    end = place.statement.end_lineno or line.number
    own = set(map(id, ast.walk(place.statement)))
    loops = [one.statement for one in place.around if isinstance(one.statement, LOOPS)]
    in_loops = {id(node) for loop in loops for node in ast.walk(loop)} - own
    for node in ast.walk(place.function):
        if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
            return True
        is_read = isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        if is_read and (getattr(node, "lineno", 0) > end or id(node) in in_loops):
            return True
    return False


def _of_expressions(view: View) -> list[PointedLine]:
    """The statements that have run and are nothing but a new tensor made of a gradient."""
    run = run_lines(view)
    hooks = {
        (place.first.made_at.file, place.first.made_at.function)
        for place in view.observed.calls.places(Kind.TENSOR_HOOK)
        if place.first.made_at is not None and place.first.what == "register_hook"
    }
    return [
        PointedLine(line, NEVER, True)
        for file, function in run.nodes()
        if isinstance(function, FUNCTIONS)
        for line in _dropped_in(run, file, function, (file, function.name) in hooks)
    ]


def _dropped_in(run: RunLines, file: str, function: Function, is_hook: bool) -> Iterator[CodeLine]:
    gradients, lists = _names_of_gradients(function)
    if is_hook:
        arguments = [one.arg for one in function.args.args if one.arg not in ("self", "cls")]
        gradients |= set(arguments[-1:])
    for node in inside(function):
        if not isinstance(node, ast.Expr):
            continue
        line = CodeLine(file, node.lineno, function.name)
        names = gradients
        if isinstance(node.value, ast.Call) and called_name(node.value).startswith("_foreach_"):
            names = lists
        if run.times.get(line) and any(_is_gradient(one, names) for one in _made_of(node.value)):
            yield line


def _made_of(value: ast.expr) -> list[ast.expr]:
    """What an expression makes a new tensor of, if it does nothing else; [] if it may."""
    if isinstance(value, ast.BinOp):
        return [value.left, value.right]
    if not isinstance(value, ast.Call) or any(one.arg == "out" for one in value.keywords):
        return []
    name = called_name(value)
    if name.startswith("_foreach_") and not name.endswith("_"):
        return value.args[:1]
    if not hasattr(Tensor, f"{name}_") or not hasattr(Tensor, name) or name in NO_VALUES:
        return []
    function = value.func
    if not isinstance(function, ast.Attribute):
        return []
    if isinstance(function.value, ast.Name) and function.value.id == torch.__name__:
        return value.args[:1]
    return [function.value]


def _is_gradient(expression: ast.expr, names: set[str]) -> bool:
    """True for ``p.grad``, a part of it, and the variables that hold such."""
    while isinstance(expression, ast.Subscript) or (
        isinstance(expression, ast.Attribute) and expression.attr == "data"
    ):
        expression = expression.value
    if isinstance(expression, ast.Attribute):
        return expression.attr == "grad"
    return isinstance(expression, ast.Name) and expression.id in names


def _names_of_gradients(function: Function) -> tuple[set[str], set[str]]:
    """The variables that are set to ``.grad`` of something, or go through a list of such; and those
    that are such lists.
    """
    found: set[str] = set()
    others: set[str] = set()
    lists: set[str] = set()
    for node in inside(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            if not isinstance(target, ast.Name):
                continue
            if _is_gradient(value, set()):
                found.add(target.id)
            elif isinstance(value, ast.ListComp) and _is_gradient(value.elt, set()):
                lists.add(target.id)
            else:
                others.add(target.id)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            through = node.iter
            is_list = isinstance(through, ast.Name) and through.id in lists
            made = isinstance(through, ast.ListComp | ast.GeneratorExp)
            if is_list or (made and _is_gradient(through.elt, set())):  # type: ignore[attr-defined]
                found.add(node.target.id)
            else:
                others.add(node.target.id)
    return found - others, lists - others


# Lines that write into what a method of ``.grad`` returned, which may be a copy of it.

MAY_COPY = frozenset({"reshape", "flatten", "ravel", "contiguous", "clone", "to", "float"})
"""Methods that return a copy, or, for some layouts and types, the tensor itself or a view of it."""


def lines_into_temporaries(view: View, unchanged: str) -> list[PointedLine]:
    """The first such line that ran after backward began. ``unchanged``: whose gradients are not
    written in the end, as text.
    """
    run = run_lines(view)

    def writes(node: ast.AST) -> int | None:
        return getattr(node, "lineno", 0) if _method_written_to(node) else None

    for line in run.lines_with(writes):
        place = place_at(line)
        if place is not None and run.last.get(line, 0) > run.begun:
            method = next(filter(None, map(_method_written_to, place.nodes)))
            note = f"writes to what {method}() returns; .grad of {unchanged} is not written"
            return [PointedLine(line, note, True)]
    return []


def _method_written_to(node: ast.AST) -> str:
    """``reshape`` of ``p.grad.reshape(-1).copy_(...)``; "" for anything else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    made = node.func.value
    if node.func.attr != "copy_" or not isinstance(made, ast.Call):
        return ""
    of = made.func.value if isinstance(made.func, ast.Attribute) else None
    is_gradient = isinstance(of, ast.Attribute) and of.attr == "grad"
    return called_name(made) if is_gradient and called_name(made) in MAY_COPY else ""


# The lines that clear or set gradients between two backward passes of one step.


def backward_count(view: View) -> int:
    """How often the lowest rank that was observed called backward in this step."""
    calls = view.observed.calls
    of_rank = calls.of(min(calls.by_rank, default=0))
    return sum(call.kind is Kind.BACKWARD for call in of_rank)


def lines_that_clear(view: View) -> list[CallSite]:
    """The lines that clear gradients, or set them to something else, between two backwards.

    Reducing a gradient does not count, nor does multiplying it by a number.
    """
    calls = view.observed.calls
    begun = {
        rank: [call.backwards for call in of_rank if call.kind is Kind.BACKWARD]
        for rank, of_rank in calls.by_rank.items()
    }
    rank = min(begun, default=0)
    if not begun or len(begun[rank]) < 2:
        return []
    first, last = begun[rank][0], begun[rank][-1]  # the numbers of backwards before these

    def between(call: Call) -> bool:
        return first < call.backwards <= last and not call.in_backward

    cleared = calls.changes(
        lambda call: between(call) and call.change is not None and call.change.cleared
    )
    asked = calls.places(Kind.ZERO_GRAD, where=between)
    if cleared or asked:
        return [*asked, *cleared]
    return calls.changes(
        lambda call: between(call) and call.change is not None and call.change.factor is None
    )


# The lines between two backward passes that clear some gradients, and not those that need it.


def lines_of_partial_clears(view: View) -> list[PointedLine]:
    """The last such line, and what chose the gradients that it clears; [] if there is none.

    Gradients that differ were not cleared, while others were.
    """
    places = [place for place in lines_that_clear(view) if _cleared_at(place)]
    cleared = {name for place in places for name in _cleared_at(place)}
    left = sorted(view.measured.differing - cleared)
    if not places or not left or not view.measured.differing:
        return []
    place = places[-1]
    count, total = len(_cleared_at(place)), len(view.parameters.names)
    others = f" and {len(left) - 1} more" if len(left) > 1 else ""
    note = f"clears {count} of {total} gradients, not that of {left[0]}{others}"
    decided = lines_that_left_out(view, place)
    if not decided:
        run = run_lines(view, place.ranks[0])
        decided = lines_behind(run, place.line, 1)
    return [
        *(one for one in decided if one.line != place.line),
        place.pointed(note, is_fault=True),
    ]


def _cleared_at(place: CallSite) -> set[str]:
    """The gradients that were seen to be cleared at this place."""
    return {
        name
        for call in place.calls
        if call.kind is Kind.CHANGE and call.change is not None and call.change.cleared
        for name in call.change.names
    }


# The lines where the gradients of some ranks are lost.


def lines_of_left_out(view: View, ranks: Sequence[int]) -> Sequence[PointedLine]:
    """Where the gradients of these ranks are cleared, never computed, or reduced without them.

    ``ranks``: those that are left out; () if these are not known.
    """
    if not ranks:
        return ()
    who = ranks_by_number(ranks)
    cleared = last_of(_cleared_by(view, ranks), f"clears gradients on {who}")
    if cleared:
        return cleared
    parting = where_they_part(view, ranks)
    if set(ranks_without_gradient(view)) >= set(ranks):
        return [parting] if parting is not None else _lines_of_zero(view, ranks)
    without = _reduced_without(view, ranks)
    made = [place.pointed(is_fault=True) for place in _groups_made(view, without, ranks)]
    note = f"reduces without {who}"
    pointed = [*made, *(place.pointed(note, is_fault=not made) for place in without)]
    pointed = pointed or _sums_without(view, ranks)
    if pointed or parting is not None:
        return pointed or [one for one in (parting,) if one is not None]
    reduced = view.observed.calls.backwards if view.observed.wrappers else []
    return last_of(reduced, f"DDP reduces here; the gradients of {who} are missing in the result")


def _sums_without(view: View, ranks: Sequence[int]) -> list[PointedLine]:
    """Where tensors are received point to point, or the last collective behind backward."""
    others = [rank for rank in range(view.world_size) if rank not in ranks]
    exchanged = lines_of_exchange(view, others[0]) if others else []
    last = view.observed.calls.places(
        Kind.COLLECTIVE, where=lambda call: call.backwards > 0 and not call.in_backward
    )[-1:]
    note = f"what is made of its result lacks {ranks_by_number(ranks)}"
    return exchanged or [place.pointed(note, is_fault=True) for place in last]


def fix_of_left_out(view: View, ranks: Sequence[int]) -> str:
    """What to write so that the gradients of these ranks count."""
    size = view.world_size
    if ranks and _cleared_by(view, ranks):
        return f"keep the gradients of {ranks_by_number(ranks)}, and divide by {size}."
    if ranks and set(ranks_without_gradient(view)) >= set(ranks):
        return f"let {ranks_by_number(ranks)} compute the gradient of the examples given there."
    who = ranks_by_number(ranks) if ranks else "every rank"
    return f"let {who} take part in an all_reduce of all {size} ranks, and divide by {size}."


def ranks_without_gradient(view: View) -> tuple[int, ...]:
    """The ranks whose backward passes were seen to compute nothing but zeros."""
    if view.observed_gradients is None:
        return ()
    computed = view.local_gradients[0]
    return tuple(rank for rank in range(view.world_size) if not bool(computed[rank].any()))


def _cleared_by(view: View, ranks: Sequence[int]) -> list[CallSite]:
    """The lines where only these ranks clear gradients after they have computed some."""

    def clears(call: Call) -> bool:
        return call.change is not None and call.change.cleared and call.backwards > 0

    places = view.observed.calls.changes(clears)
    return [place for place in places if set(place.ranks) == set(ranks)]


def _lines_of_zero(view: View, ranks: Sequence[int]) -> Sequence[PointedLine]:
    """The last line that computed a loss whose gradient is zero."""
    note = f"the gradient of {ranks_by_number(ranks)} is zero"
    places = view.observed.calls.places(Kind.LOSS_FUNCTIONS) or view.observed.calls.backwards
    return first_of([place for place in places if set(ranks) <= set(place.ranks)], note)


def _reduced_without(view: View, ranks: Sequence[int]) -> list[CallSite]:
    """The first line that reduces gradients among others and has no group with these ranks.

    If there is none, the last line whose groups do not join these ranks with others.
    """
    reductions = view.observed.calls.reductions
    absent = [one for one in reductions if not set(ranks) & set().union(*one.groups)]
    apart = [one for one in reductions if not set(ranks) & _partners(one, ranks)]
    return absent[:1] or apart[-1:]


def _partners(place: CallSite, ranks: Sequence[int]) -> set[int]:
    """The ranks of the groups of this place that hold another rank than these."""
    return {rank for group in place.groups if set(group) - set(ranks) for rank in group}


def _groups_made(view: View, without: Sequence[CallSite], ranks: Sequence[int]) -> list[CallSite]:
    """The line that made the group which lacks these ranks; one of their node, if there is one."""
    groups = {group for place in without for group in place.groups}
    calls = view.observed.calls
    if not without and calls.places(Kind.WRAP):
        return calls.places(Kind.NEW_GROUP, where=lambda call: not set(ranks) & set(call.ranks))[:1]
    made = calls.places(Kind.NEW_GROUP, where=lambda call: tuple(sorted(call.ranks)) in groups)
    nodes = [set(node) for node in view.setting.ranks_by_node if set(node) & set(ranks)]
    near = [place for place in made if any(node & set(place.first.ranks) for node in nodes)]
    return (near or made)[:1]
