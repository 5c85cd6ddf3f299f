"""Faults of a forward pass: exchanges, modes of modules, and embeddings that scale by frequency."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from torch import nn

from ddp_equivalence.case.build import build_model
from ddp_equivalence.diagnosis.lines.of_reduction import way_to
from ddp_equivalence.diagnosis.lines.origins import chosen, links_of, links_of_line
from ddp_equivalence.diagnosis.lines.source_tree import (
    RunLines,
    called_name,
    inside,
    lines_that_set_variable,
    place_of,
    run_lines,
    tree_of,
)
from ddp_equivalence.diagnosis.lines.source_tree import SourceLine as AtLine
from ddp_equivalence.diagnosis.reduced import groups_text
from ddp_equivalence.diagnosis.setting import REDUCING, CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.cut_graph import own_backward_lines
from ddp_equivalence.diagnosis.whereabouts.gradient_path import line_of
from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces, calls_of, replay_of
from ddp_equivalence.diagnosis.whereabouts.two_logs import TwoLogs
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, named
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.calls import (
    Call,
    CodeLine,
    Contents,
    Kind,
    ModuleCall,
    Operation,
    Operations,
    is_users,
)
from ddp_equivalence.measurement.observation import Observation

# Collectives in a forward pass of which autograd knows nothing, on the way to wrong gradients.


def past_autograd(logs: TwoLogs) -> tuple[Operation, ...]:
    """The collectives outside of backward passes that took what has a gradient, left something
    that was not computed from it as far as autograd knows, and went into a wrong gradient.

    Each line once, in the order in which the first rank ran them.
    """
    wrong = [name for name, number in logs.alone.left.items() if logs.is_wrong(name, number)]
    first = logs.ranks[0]
    found: dict[object, Operation] = {}
    for number in sorted(
        _behind(first, [first.results[one] for one in wrong if one in first.results])
    ):
        operation = first.operations[number]
        if operation.loses_gradient and not operation.in_backward and operation.line is not None:
            found.setdefault(operation.line, operation)
    return tuple(found.values())


def _behind(run: Operations, results: Sequence[int]) -> set[int]:
    """All operations on which these depend."""
    open_ones, seen = list(results), set[int]()
    while open_ones:
        number = open_ones.pop()
        if number not in seen:
            seen.add(number)
            open_ones.extend(run.operations[number].after)
    return seen


# What ranks exchange in a forward pass, and how its gradient comes back.

MOST_NUMBERS = 16
"""A tensor with more elements is no count, or a few of them."""


def exchange_lines(pieces: Pieces, piece: Piece) -> list[PointedLine]:
    """The last collective of something else than gradients or parameters before a backward pass:
    with it, what a rank computes may depend on the rows of others. And the backward methods of the
    user's own that ran then.
    """
    places = pieces.view.observed.calls.places(
        Kind.COLLECTIVE,
        where=lambda call: (
            piece.call is not None
            and call.backwards == piece.call.backwards
            and not call.in_backward
            and call.collective is not None
            and call.collective.contents is Contents.OTHER
            and call.collective.elements > 1
        ),
    )
    lines = [
        place.pointed(f"{place.first.collective.op} before backward")
        for place in places[-1:]
        if place.first.collective is not None
    ]
    return [*lines, *own_backward_lines(pieces, piece)] if lines else []


def lines_of_separate_counts(view: View) -> list[PointedLine]:
    """The lines that add up numbers before backward in groups that no other such line joins: each
    group has another number then.
    """

    def adds_up(call: Call) -> bool:
        collective = call.collective
        return (
            collective is not None
            and collective.op == "all_reduce"
            and collective.contents is Contents.OTHER
            and collective.elements <= MOST_NUMBERS
            and call.backwards == 0
            and not call.in_backward
        )

    places = view.observed.calls.places(Kind.COLLECTIVE, where=adds_up)
    ranks = set(range(view.world_size))
    if any(set(group) == ranks for place in places for group in place.groups):
        return []
    return [
        place.pointed(
            f"sums in {groups_text(place.groups)}, and none over all {view.world_size} ranks",
            is_fault=True,
        )
        for place in places
        if len(place.groups) > 1 and len(places) == 1
    ]


# The lines that gave a module of the model another mode, or another number, than it had.

MOST_STATE_LINES = 2


def mode_text(call: ModuleCall) -> str:
    """In which mode a module was called, unlike for the big batch, as a clause."""
    modes = ("training", "evaluation") if call.training else ("evaluation", "training")
    whom = call.name or "the model"
    return f"{whom} is called in {modes[0]} mode, and in {modes[1]} mode for the big batch"


def lines_of_mode(seen: Observation, call: ModuleCall) -> list[PointedLine]:
    """The line that gave a called module the mode that it was called in; [] if none was seen."""
    what = f"training = {call.training}"
    mode = "training" if call.training else "evaluation"
    setting = [
        one
        for one in _states_before(seen, call.step, call.backwards)
        if one.what.startswith("training = ") and call.name in one.names
    ]
    if not setting or setting[-1].what != what:
        return []
    line = line_of(setting[-1])
    whole = "" in setting[-1].names
    whom = "the model" if whole else f"{call.name or 'the model'}"
    note = f"puts {whom} into {mode} mode, and its forward pass runs in it"
    return [PointedLine(line, note, is_fault=True)] if line is not None else []


def lines_of_state(seen: Observation, call: ModuleCall) -> list[PointedLine]:
    """The lines that set attributes of the called module, of one around it or of one inside it."""
    found: dict[object, PointedLine] = {}
    for one in _states_before(seen, call.step, call.backwards):
        about = [name for name in one.names if _are_related(name, call.name)]
        line = line_of(one)
        if about and line is not None:
            whom = about[0] or "the model"
            found[line] = PointedLine(line, f"sets {one.what} on {whom}")
    return list(found.values())[-MOST_STATE_LINES:]


def other_mode(pieces: Pieces, piece: Piece) -> ModuleCall | None:
    """The outermost call of a piece whose mode is not that of the same module in the replay."""
    replay = replay_of(pieces, piece)
    return None if replay is None else wrong_mode(calls_of(pieces, piece), replay.with_gradients)


def wrong_mode(calls: Sequence[ModuleCall], alone: Sequence[ModuleCall]) -> ModuleCall | None:
    """The outermost call whose mode is not that of the same module in the replay."""
    modes: dict[str, set[bool]] = {}
    for call in alone:
        modes.setdefault(call.name, set()).add(call.training)
    wrong = [call for call in calls if call.name in modes and call.training not in modes[call.name]]
    return min(wrong, key=lambda call: (call.name.count("."), call.name), default=None)


def _states_before(seen: Observation, step: int, backwards: int) -> list[Call]:
    return [
        one
        for one in seen.calls
        if one.kind is Kind.MODULE_STATE and (one.step, one.backwards) <= (step, backwards)
    ]


def _are_related(one: str, other: str) -> bool:
    """True if one module is the other, is inside it, or is around it."""
    inside = not other or one.startswith(f"{other}.")
    return not one or one == other or inside or other.startswith(f"{one}.")


# An embedding divides the gradient of a row by how often the row occurs in the batch that it
# sees.
#
# Source: docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html, ``scale_grad_by_freq``.

KEYWORD = "scale_grad_by_freq"


def fault_of_frequencies(view: View) -> Whereabouts | None:
    """None unless all parameters that differ are weights of such embeddings."""
    with without_planted_faults():
        model = build_model(view.setting.case)
    scaled = {
        name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq
        for name, _ in module.named_parameters(prefix)
    }
    names = [name for name in view.parameters.names if name in view.measured.differing]
    if not names or not scaled.issuperset(names):
        return None
    note = "divides by how often a row occurs in the batch that it sees: the rank's own"
    lines = [PointedLine(line, note, is_fault=True) for line in _lines(view)]
    return Whereabouts(
        kind="big batch",
        headline="an embedding counts rows on each rank alone",
        sentence=f"With {KEYWORD}, the gradient of {named(names)} depends on how often each row "
        "occurs in the rank's own batch.",
        lines=distinct(lines),
        parameters=tuple(names),
        ranks=tuple(view.setting.reporting_ranks),
        fix=f"leave out {KEYWORD}, or divide by the counts of all ranks.",
        explains_all=True,
    )


def _lines(view: View) -> Iterator[CodeLine]:
    """The calls in the user's files that switch this option on, or may do so."""
    files = list(run_lines(view, view.setting.reporting_ranks[0]).files)
    model = view.setting.case.model
    with suppress(TypeError):  # of an object that can be called
        files += [] if isinstance(model, str) else [inspect.getsourcefile(model) or ""]
    for file in filter(is_users, dict.fromkeys(files)):
        tree = tree_of(file)
        for node in ast.walk(tree) if tree is not None else ():
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg == KEYWORD and not is_off:
                    yield CodeLine(file, keyword.lineno)


# Some elements of a gradient are the rank's own, and all others are right.

FEWEST = 2
"""So many elements, on all ranks together, must be the ranks' own before this is said."""


def elements_left_out(pieces: Pieces) -> Whereabouts | None:
    """None unless single elements of a parameter are, on each rank, what the rank computed."""
    view = pieces.view
    found = _own_elements(pieces)
    sizes = {name: view.parameters.total_of([name]) for name in found}
    if not found or all(len(one) == sizes[name] for name, one in found.items()):
        return None
    texts = [_text(name, one, sizes[name]) for name, one in found.items()]
    several = len(texts) > 1 or max(map(len, found.values())) > 1
    are = "are" if several else "is"
    what = named(texts)
    note = f"{what} {'stay' if several else 'stays'} the rank's own"
    places = [place for place in view.observed.calls.reductions if not place.first.in_backward]
    return Whereabouts(
        "reduction",
        "some elements of a gradient stay each rank's own",
        f"{what[:1].upper()}{what[1:]} {are}, on each rank, what the rank itself computed; all "
        "other elements are right.",
        distinct(
            [
                *(line for place in places[:1] for line in _slice(pieces, place)),
                *(place.pointed(note, is_fault=True) for place in places[:1]),
            ]
        ),
        fix=f"reduce all {view.parameters.total} elements.",
    )


def _own_elements(pieces: Pieces) -> dict[str, list[int]]:
    """Parameter -> its elements that are each rank's own; empty unless all others are right."""
    view = pieces.view
    ranks = view.setting.reporting_ranks
    held, own = view.measured.by_rank, pieces.own[list(ranks)]
    if len(ranks) < FEWEST or not bool(held.isfinite().all()):
        return {}
    most = float(view.expected.abs().max()) * pieces.tolerance
    wrong = ((held - view.expected).abs() > most).any(0)
    if int(wrong.sum()) * len(ranks) < FEWEST or bool(wrong.all()):
        return {}
    if bool(((held - own)[:, wrong].abs() > most).any()):
        return {}
    if not bool(((own - own[0])[:, wrong].abs() > most).any(0).all()):
        return {}  # what all ranks have computed alike may have been reduced
    found = {}
    for name, place in view.parameters.places.items():
        numbers = torch.nonzero(wrong[place]).flatten().tolist()
        if numbers and place.stop - place.start != view.parameters.total_of([name]):
            return {}  # a sample does not say which elements these are
        if numbers:
            found[name] = numbers
    return found


def _text(name: str, numbers: list[int], size: int) -> str:
    """Elements as text, counted from 0: ``elements 4 to 5 of fc.bias``."""
    if len(numbers) == size:
        return name
    if len(numbers) == 1:
        return f"element {numbers[0]} of {name}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"elements {numbers[0]} to {numbers[-1]} of {name}"
    return f"{len(numbers)} elements of {name}"


def _made_at(run: RunLines, at: AtLine, name: str) -> CodeLine | None:
    """The only line that gives a variable a tensor; those that change it in place do not count."""
    lines = [
        line
        for line in lines_that_set_variable(run, at, name)
        if (place := place_of(line.file, line.number)) is not None
        and not isinstance(place.statement, ast.AugAssign)
    ]
    return lines[0] if len(lines) == 1 else None


def _slice(pieces: Pieces, place: CallSite) -> list[PointedLine]:
    """The line that takes the part of a tensor which a collective is given."""
    run = run_lines(pieces.view, place.ranks[0])
    at = place_of(place.line.file, place.line.number)
    for node in [at.statement, *inside(at.statement)] if at is not None else ():
        if isinstance(node, ast.Call) and called_name(node) in REDUCING and node.args:
            assert at is not None
            way = way_to(pieces.view, place.first)
            given = node.args[0]
            links = links_of(run, at, given, way[1:])
            if not links and isinstance(given, ast.Name):
                made_at = _made_at(run, at, given.id)
                links = links_of_line(run, made_at) if made_at is not None else []
            link = chosen(links)
            if link is not None and link.selects and link.line != place.line:
                note = f"takes the part that line {place.line.number} reduces"
                return [PointedLine(link.line, note, True)]
    return []
