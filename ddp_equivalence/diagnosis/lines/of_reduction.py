"""The lines of a reduction: what it reduces, how often, for whom, and where its result goes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.lines.of_loss import line_that_scales_loss
from ddp_equivalence.diagnosis.lines.origins import (
    Link,
    chosen,
    divisors,
    divisors_in_function,
    gone_through,
    line_in_function,
    line_of_compared,
    lines_that_set_attribute,
    links_of,
    links_of_line,
)
from ddp_equivalence.diagnosis.lines.source_tree import (
    Decision,
    RunLines,
    called_name,
    conditions,
    decisions,
    inside,
    loops_around,
    place_of,
    run_lines,
    tree_of,
)
from ddp_equivalence.diagnosis.lines.words import scaling_text
from ddp_equivalence.diagnosis.reduced import groups_text
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine, StepCalls, reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Contents, Kind

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
    inside = [
        place
        for place in calls.reductions
        if place.first.in_backward and place.line not in backwards
    ]
    return inside or calls.places(Kind.HOOK)


def hook_was_registered(view: View) -> bool:
    """True if DDP was given a communication hook. Tensors have hooks of their own."""
    return bool(view.observed.calls.places(Kind.HOOK))


def ddp_reduces(view: View) -> bool:
    """True if DDP was to reduce gradients in the last backward pass, without a hook."""
    synchronises = any(wrapper.synchronised[-1:] == (True,) for wrapper in view.observed.wrappers)
    return synchronises and not view.observed.calls.places(Kind.HOOK)


def is_unseen(view: View) -> bool:
    """True if it was not seen what reduces the gradients, such as FSDP or this package."""
    return not (by_hand(view) or in_hook(view) or ddp_reduces(view))


def line_of_reduction(
    view: View, note: Callable[[str], str] = str, is_fault: bool = False, missing: str = ""
) -> PointedLine | None:
    """The last line at which gradients are reduced; None if none was seen.

    ``note`` gets what was seen to happen there, and returns what the report says of it.
    """
    for place in reversed(by_hand(view)):
        seen = f"{len(place.calls)} {_operation(place)}, over {_ranks(place)} ranks"
        return place.pointed(note(seen), is_fault, missing)
    for place in reversed(in_hook(view)):
        seen = hook_text(place)
        if place.kind is Kind.COLLECTIVE:
            inside = "in the communication hook" if hook_was_registered(view) else "during backward"
            seen = f"{_operation(place)} over {_ranks(place)} ranks, {inside}"
        return place.pointed(note(seen), is_fault, missing)
    if ddp_reduces(view):
        for place in reversed(view.observed.calls.backwards):
            seen = f"DDP averages over {_ranks_of_ddp(view)} ranks here"
            return place.pointed(note(seen), is_fault, missing)
    return None


def line_that_scales_gradients(view: View, factor: float) -> PointedLine | None:
    """The last line that multiplies gradients by this number; None if none was seen."""
    places = view.observed.calls.multiplied_by(factor)
    if not places:
        return None
    what = "the gradient" if len(places[-1].names) == 1 else f"{len(places[-1].names)} gradients"
    return places[-1].pointed(scaling_text(what, factor), True)


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


def _ranks_of_ddp(view: View) -> int:
    """The number of ranks that DDP averages over; fewer than all if it was given a group."""
    logged = [wrapper.logged.get("world_size") for wrapper in view.observed.wrappers]
    return min([size for size in logged if isinstance(size, int)], default=view.world_size)


def hook_text(place: CallSite) -> str:
    """What a line does that registers a communication hook."""
    return f"gives DDP a communication hook, {place.first.what}"


def _operation(place: CallSite) -> str:
    collective = place.first.collective
    return "" if collective is None else f"{collective.op} {collective.reduce_op}".strip()


def _ranks(place: CallSite) -> int:
    return max((len(group) for group in place.groups), default=0)


# The lines around a reduction that decided what it reduces, how often it runs, and for whom.


def way_to(view: View, call: Call) -> tuple[CodeLine, ...]:
    """The line that made a call and those that led to it, the innermost first, up to the function
    that called backward; of a call in a hook, only those of the hook.
    """
    line = call.users_line or call.line
    if line is None:
        return ()
    backward = {one.line for one in view.observed.calls.places(Kind.BACKWARD)}
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
    if link is not None:
        note = f"makes {link.name}, which the loop goes through"
        note = note if link.name else "chooses what the loop goes through"
        return [PointedLine(link.line, note, True)] if link.line != place.line else []
    return _lines_that_made(run, place, way[1:])


def _lines_that_made(
    run: RunLines, place: CallSite, callers: Sequence[CodeLine]
) -> list[PointedLine]:
    """The line that made the tensor which a collective was given, or what it was made of."""
    made_at = place.first.made_at
    if made_at is None or made_at == place.line:
        return []
    link = chosen(links_of_line(run, made_at, callers))
    if link is None or link.line == made_at or link.line == place.line:
        note = f"makes the tensor that line {place.line.number} is given"
        return [PointedLine(made_at, note, True)]
    return [
        PointedLine(link.line, f"gives {link.name}, of which line {made_at.number} is made", True)
    ]


def lines_of_no_sync(view: View) -> list[PointedLine]:
    """The line that decided that ``no_sync`` is entered, or else the line that enters it."""
    for place in view.observed.calls.places(Kind.NO_SYNC)[-1:]:
        run = run_lines(view, place.ranks[0])
        decision = _condition_of(run, place.line)
        if decision is not None:
            return [
                decision.pointed(),
                place.pointed("no synchronisation inside"),
            ]
        made = _context_made(run, place.line)
        return [
            *(PointedLine(one, "chooses whether DDP synchronises", True) for one in made),
            place.pointed("no synchronisation inside", is_fault=not made),
        ]
    return []


def _condition_of(run: RunLines, line: CodeLine) -> Decision | None:
    place = place_of(line.file, line.number)
    return next(conditions(run, place), None) if place is not None else None


def _context_made(run: RunLines, line: CodeLine) -> Sequence[CodeLine]:
    """The line that chose the context which a ``with`` enters by name."""
    place = place_of(line.file, line.number)
    if place is None or not isinstance(place.statement, (ast.With, ast.AsyncWith)):
        return ()
    for item in place.statement.items:
        expression = item.context_expr
        if isinstance(expression, ast.Call) and not expression.args:
            expression = expression.func
        if isinstance(expression, ast.Name):
            return [one.line for one in links_of(run, place, expression)][:1]
    return ()


def lines_of_divisor(view: View, rank: int, line: CodeLine) -> list[PointedLine]:
    """The line that made the number by which a line divides or multiplies; [] if it is not one."""
    return [
        PointedLine(link.line, f"sets {link.name}, the number at line {line.number}")
        for link in divisors(run_lines(view, rank), line)[-1:]
        if link.line != line
    ]


def lines_of_hook_number(view: View, number: float, meaning: str) -> list[PointedLine]:
    """The line that gave the state of a communication hook the number that its hook divides by.

    ``meaning``: what the number is.
    """
    for place in view.observed.calls.places(Kind.HOOK)[-1:]:
        begins = place.first.made_at
        run = run_lines(view, place.ranks[0])
        held = [name for name, value in place.first.numbers if value == number]
        named = divisors_in_function(begins) if begins is not None else ()
        for name in held:
            if name in named:
                return [
                    PointedLine(
                        links_of_line(run, at)[-1].line, f"{name} is {number:g}, {meaning}", True
                    )
                    for at in lines_that_set_attribute(run, name)
                ]
    return []


def lines_of_hook_divisors(view: View, hook: CallSite) -> list[PointedLine]:
    """The lines that set what a communication hook multiplies or divides by."""
    begins = hook.first.made_at
    run = run_lines(view, hook.ranks[0])
    return [
        PointedLine(line, f"sets {name}, by which {begins.function} multiplies or divides")
        for name in (divisors_in_function(begins) if begins is not None else ())
        for line in lines_that_set_attribute(run, name)
        if begins is not None
    ]


def lines_of_exchange(view: View, rank: int, only_if_few: bool = False) -> list[PointedLine]:
    """The innermost loop in which a rank receives tensors point to point, and how many it gets.

    Without a loop, the line that receives. ``only_if_few``: only if it receives fewer tensors than
    there are other ranks.
    """
    calls = [
        call
        for call in view.observed.calls.of(rank)
        if call.kind is Kind.POINT_TO_POINT
        and call.what in ("recv", "irecv")
        and call.backwards > 0
    ]
    if not calls:
        return []
    if len(calls) >= view.world_size - 1 and only_if_few:
        return []
    calls = [one for one in calls if (one.line, one.callers) == (calls[0].line, calls[0].callers)]
    times = "once" if len(calls) == 1 else f"{len(calls)} times"
    others = view.world_size - 1
    note = f"rank {rank} receives {times}; there {'is' if others == 1 else 'are'} {others} other"
    note += " rank" if others == 1 else " ranks"
    way = way_to(view, calls[0])
    for line in way:
        place = place_of(line.file, line.number)
        for loop in loops_around(place) if place is not None else ():
            assert place is not None
            return [PointedLine(place.line(loop), f"in this loop {note}", True)]
    return [PointedLine(line, note, True) for line in way[:1]]


# The lines that computed which ranks a process group is made of.

GIVEN = {
    "new_group": ("ranks", 0),
    "new_subgroups": ("group_size", 0),
    "new_subgroups_by_enumeration": ("ranks_per_subgroup_list", 0),
    "init_device_mesh": ("mesh_shape", 1),
    "DeviceMesh": ("mesh", 1),
}
"""The functions that make groups -> the argument that says of which ranks: its name and place."""

MOST_ORIGINS = 2


def with_origins_of_groups(view: View, lines: Sequence[PointedLine]) -> list[PointedLine]:
    """The lines, and beside the first one that makes groups those that computed their ranks."""
    known = {one.line for one in lines}
    for number, one in enumerate(lines):
        origins = [origin for origin in _origins(view, one.line) if origin.line not in known]
        if origins:
            if one.note:
                told = f"; line {one.line.number} {one.note}"
                origins = [replace(origin, note=origin.note + told) for origin in origins]
            del origins[MOST_ORIGINS:]
            if any(origin.is_fault for origin in origins):
                pair = [*origins, replace(one, is_fault=False)]
            else:
                pair = [one, *origins]
            return [*lines[:number], *pair, *lines[number + 1 :]]
    return list(lines)


def _origins(view: View, line: CodeLine) -> list[PointedLine]:
    """The lines that computed the ranks of the groups that this line has made."""
    rank = min(view.observed.by_rank, default=0)
    found: dict[CodeLine, list[tuple[int, ...]]] = {}
    computing: set[CodeLine] = set()
    for call in _made_at(view, rank, line):
        link = _origin(view, rank, call)
        if link is not None and link.line != line:
            found.setdefault(link.line, []).append(tuple(call.ranks))
            if link.selects or _computes(link):
                computing.add(link.line)
    groups_of = {origin: tuple(sorted(set(ranks))) for origin, ranks in found.items()}
    shown = []
    for origin, groups in groups_of.items():
        alike = [one for one, others in groups_of.items() if others == groups]
        again = f", as line {alike[0].number} does" if origin != alike[0] else ""
        # Of lines that make the same groups, the first one may well be right.
        is_fault = origin in computing and (origin != alike[0] or len(alike) == 1)
        shown.append(PointedLine(origin, f"makes {groups_text(groups)}{again}", is_fault))
    return sorted(shown, key=lambda one: not one.is_fault)


def _made_at(view: View, rank: int, line: CodeLine) -> Iterator[Call]:
    """The groups that a line has made; those in which gradients were reduced, if it made some."""
    seen = view.observed.by_rank.get(rank)
    of_all_steps = StepCalls({} if seen is None else {rank: seen.calls})
    used = {
        frozenset(call.collective.ranks)
        for seen in view.observed.by_rank.values()
        for call in seen.calls
        if call.collective is not None and reduces_gradients(call)
    }
    for place in of_all_steps.places(Kind.NEW_GROUP):
        if place.line == line:
            in_use = [call for call in place.calls if frozenset(call.ranks) in used]
            yield from in_use or place.calls


def _origin(view: View, rank: int, call: Call) -> Link | None:
    """The line that computed the ranks of a group, or else where they come from."""
    line = call.users_line or call.line
    place = place_of(line.file, line.number) if line is not None else None
    given = _given(place.statement) if place is not None else None
    if line is None or place is None or given is None:
        return None
    callers = [one for one in call.callers if (one.file, one.number) != (line.file, line.number)]
    links = links_of(run_lines(view, rank), place, given, callers)
    return next((one for one in links if one.selects or _computes(one)), chosen(links))


def _computes(link: Link) -> bool:
    """True if the line computes the value that it names, and does not only pass it on."""
    place = place_of(link.line.file, link.line.number)
    statement = place.statement if place is not None else None
    if not isinstance(statement, ast.Assign) or not statement.targets:
        return False
    target = statement.targets[0]
    name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
    return name == link.name and any(
        isinstance(node, ast.BinOp | ast.Compare | ast.ListComp) for node in ast.walk(statement)
    )


def _given(statement: ast.stmt) -> ast.expr | None:
    """The expression that says of which ranks the groups are to be."""
    for node in (statement, *inside(statement)):
        name = called_name(node) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name in GIVEN:
            argument, at = GIVEN[name]
            named = [one.value for one in node.keywords if one.arg == argument]
            return next(iter(named or node.args[at : at + 1]), None)
    return None


# The lines that call a method of the module inside a wrapper, past the wrapper's own forward.

NOT_A_FORWARD = frozenset(
    {"parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules"}
    | {"state_dict", "load_state_dict", "train", "eval", "zero_grad", "children", "to"}
    | {"requires_grad_", "apply", "named_children", "register_buffer", "get_submodule"}
)
"""Methods of a module that compute nothing."""


def lines_past_the_wrapper(view: View) -> list[PointedLine]:
    """The lines that have run and call ``ddp.module(...)`` or ``ddp.module.method(...)``."""
    run = run_lines(view, min(view.observed.by_rank, default=0))
    found: dict[tuple[str, int], PointedLine] = {}
    for file in run.files:
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, ast.Call) or not _is_past_a_wrapper(node.func):
                continue
            line = line_in_function(file, node.lineno)
            if line is not None and run.times.get(line):
                note = f"calls {ast.unparse(node.func)}, which DDP does not see"
                found[file, line.number] = PointedLine(line, note, is_fault=True)
    return list(found.values())


def _is_past_a_wrapper(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr == "module":
        return True
    inner = function.value
    is_of_the_module = isinstance(inner, ast.Attribute) and inner.attr == "module"
    return is_of_the_module and function.attr not in NOT_A_FORWARD


# Collectives that write their result to a temporary tensor, which nothing can use afterwards.

CONSTANTS = frozenset({"zeros", "ones", "empty", "full", "tensor", "new_zeros", "new_ones"})
"""A tensor that is made for a collective alone makes the ranks wait for each other."""


OF_GRADIENTS = frozenset({Contents.COPIES_OF_GRADIENTS, Contents.COPIES_OF_PARAMETERS})


def lines_of_lost_results(view: View, only_gradients: bool = False) -> list[PointedLine]:
    """The first line whose collective changed nothing but a tensor that was gone afterwards.

    ``only_gradients``: the tensor must have been a copy of gradients or parameters.
    """
    places = view.observed.calls.places(
        Kind.COLLECTIVE,
        where=lambda call: (
            call.collective is not None
            and call.collective.result_is_gone
            and (not only_gradients or call.collective.contents in OF_GRADIENTS)
        ),
    )
    return [
        place.pointed(f"changes {_what(view, place)}, which nothing uses afterwards", is_fault=True)
        for place in places
        if _passes_a_temporary(place)
    ][:1]


def _what(view: View, place: CallSite) -> str:
    """How often the line changed a temporary tensor, where that was not always so."""
    rank = place.ranks[0]
    calls = [
        call
        for call in view.observed.calls.of(rank)
        if call.kind is Kind.COLLECTIVE and (call.users_line or call.line) == place.line
    ]
    if len(place.calls) == len(calls) == 1:
        return "a temporary tensor"
    return f"a temporary tensor in {len(place.calls)} of {len(calls)} calls"


def _passes_a_temporary(place: CallSite) -> bool:
    """True if the line is nothing but a call, and what it is given has no name."""
    where = place_of(place.line.file, place.line.number)
    collective = place.first.collective
    if where is None or collective is None or not isinstance(where.statement, ast.Expr):
        return False
    call = where.statement.value
    if not isinstance(call, ast.Call) or called_name(call) != collective.op:
        return False
    given = [*call.args, *(one.value for one in call.keywords if one.arg == "tensor")][:1]
    return any(
        isinstance(one, (ast.Call, ast.BinOp, ast.UnaryOp))
        and not (isinstance(one, ast.Call) and called_name(one) in CONSTANTS)
        for one in given
    )
