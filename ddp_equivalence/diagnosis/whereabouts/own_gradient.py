"""A rank's own gradient is not what its rows give: which rank, and from where on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.examples_read import example_numbers
from ddp_equivalence.diagnosis.lines.decisions import meeting_lines
from ddp_equivalence.diagnosis.lines.of_reduction import lines_that_left_out
from ddp_equivalence.diagnosis.residual import unexplained
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.gradient_path import (
    at,
    line_of,
    lines_only_on,
    module_text,
)
from ddp_equivalence.diagnosis.whereabouts.pieces import (
    FirstDifference,
    Piece,
    Pieces,
    calls_of,
    first_difference,
    notes_of_output,
    pieces_of,
)
from ddp_equivalence.diagnosis.whereabouts.whereabouts import (
    Whereabouts,
    distinct,
    named,
    not_seen,
    of_all,
    ranked,
)
from ddp_equivalence.measurement.calls import Call, Kind
from ddp_equivalence.measurement.observation import Observation

MOST_REPLAYED = 8
"""The forward passes of so many pieces are replayed."""

MOST_CHANGES = 2

RIGHT = "the outputs are right"
WITHHOLDS = "returns no gradient"

SAME_LOSS = 1e-5
"""Losses whose relative difference is smaller are equal."""


@dataclass(frozen=True)
class Compared:
    """A piece beside its rows alone. ``factor``: its gradient is this many times that of its rows;
    None if it is no multiple of it. ``loss_alone``: the loss of its rows.
    """

    piece: Piece
    factor: float | None
    gradient_alone: Tensor
    loss_alone: float

    @property
    def error(self) -> float:
        """How far the gradient is from that of its rows, relative to the latter."""
        norm = float(self.gradient_alone.norm())
        return float((self.piece.gradient - self.gradient_alone).norm()) / norm if norm else 0.0

    @property
    def loss_factor(self) -> float | None:
        """The loss at which backward began is this many times that of its rows."""
        if self.piece.loss is None or not self.loss_alone:
            return None
        return self.piece.loss / self.loss_alone

    @property
    def is_loss_right(self) -> bool | None:
        """Whether backward began at the loss of the rows; None if that is not known."""
        factor = self.loss_factor
        return None if factor is None else abs(factor - 1) <= SAME_LOSS

    @property
    def losses(self) -> str:
        """Both losses: ``its loss is 1.8, its own rows give 0.9``."""
        alone = text_of(self.loss_alone, ".5g")
        if self.piece.loss is None:
            return f"its own rows give the loss {alone}"
        if self.is_loss_right:
            return f"its loss is that of its own rows, {alone}"
        return f"its loss is {text_of(self.piece.loss, '.5g')}, its own rows give {alone}"


def compared_with_rows(pieces: Pieces) -> list[Compared] | None:
    """Every piece beside its rows alone; None if the rows of one are not known."""
    found = []
    for piece in pieces.all:
        alone = pieces.alone(piece)
        if alone is None:
            return None
        factor = pieces.factor_between(piece.gradient, alone.gradient)
        if factor is None and not piece.gradient.any() and not alone.gradient.any():
            factor = 1.0
        drawn = pieces.alone(piece, drawn_again=True) if factor is None else None
        if drawn is not None and pieces.view.setting.draws_on_cpu:
            again = pieces.factor_between(piece.gradient, drawn.gradient)
            alone, factor = (drawn, again) if again is not None else (alone, factor)
        found.append(Compared(piece, factor, alone.gradient, alone.loss))
    return found


def fault_of_own_gradient(
    pieces: Pieces, wrong: Sequence[Compared], computed: str = "another gradient"
) -> Whereabouts:
    """Where the pieces in ``wrong``, which are no multiples of their rows' gradients, go astray.

    ``computed``: what their ranks computed that their rows do not give.
    """
    differences = [(one, first_difference(pieces, one.piece)) for one in wrong[:MOST_REPLAYED]]
    one, found = next(
        ((one, found) for one, found in differences if found and found.what != "none"),
        differences[0],
    )
    world_size = pieces.view.world_size
    ranks = tuple(sorted({other.piece.rank for other in wrong}))
    who = ranked(ranks, world_size)
    verb = "computes" if len(ranks) == 1 or len(ranks) == world_size else "compute"
    whole = f"{who[:1].upper()}{who[1:]} {verb} {computed} than its rows give."
    whole += _which_piece(pieces, wrong)
    headline, sentence, names, lines = _from_where(pieces, one, found)
    begins = f"On rank {one.piece.rank}, {one.losses}"
    only_there = lines_only_on(pieces.view.observed.by_rank, ranks)
    changed = _changed_before(pieces, one.piece, found)
    of_loss = [_loss_line(one), _backward_line(one)]
    shown = [*only_there, *changed, *lines]
    marked = [line for line in shown if line and line.is_fault]
    between_modules = found is not None and found.what == "input"
    return Whereabouts(
        kind="own gradient",
        shows_later=between_modules or all(line in of_loss for line in marked),
        headline=f"{who if len(ranks) in (1, world_size) else f'{len(ranks)} ranks'}: {headline}",
        sentence=f"{begins}. {sentence} {whole}",
        lines=distinct([*shown, *of_loss]),
        parameters=names,
        ranks=ranks,
    )


Answer = tuple[str, str, tuple[str, ...], list[PointedLine | None]]
"""A headline, a sentence, the parameters and the lines."""


def _from_where(pieces: Pieces, one: Compared, found: FirstDifference | None) -> Answer:
    """From where on the piece is wrong."""
    names = _names(pieces, one)
    if found is None:
        text = "The forward pass could not be compared with its rows alone."
        return _headline(one), text, names, []
    if found.what == "none":
        without = calls_of(pieces, one.piece, without_gradients=True)
        which = "All modules that ran with gradients" if without else "All modules"
        agree = f"{which} return what the rows give."
        text = agree if found.before else "No module was heard."
        if one.is_loss_right is False:
            last = at(found.before.line if found.before else None, RIGHT)
            return _headline(one), text, names, [last]
        rest = [name for name in pieces.view.parameters.names if name not in names]
        lines = backward_lines(pieces, one.piece)
        for shown in lines:
            if shown is not None and shown.note.startswith(WITHHOLDS):
                what = f"Line {shown.line.number} {shown.note}."
                return "a backward method returns no gradient", what, names, lines
        text += f" Backward first leaves the right way at {named(names[:1])}"
        text += f"; {named(rest)} {'are' if len(rest) > 1 else 'is'} right." if rest else "."
        return "backward gives another gradient", text, names, lines
    call = found.call or found.before
    line = call.line if call else None
    if found.what == "missing":
        text = f"{module_text(found.alone)} is not called, though the loss of its rows calls it."
        last = at(found.before.line if found.before else None, "its output is right")
        then = at(line, f"called without {module_text(found.alone)} before it", True)
        return "a module is not called", text, names, [last, then]
    module = module_text(found.call or found.alone)
    if found.what == "input":
        return _wrong_input(one, found, module, names)
    assert found.call is not None
    assert found.alone is not None
    notes = notes_of_output(pieces, one.piece, found.call, found.alone)
    note = f" ({'; '.join(notes)})" if notes else ""
    text = f"The first module whose output differs from that of the same rows is {module}{note}."
    line_note = f"{module}: first output that differs" + (f"; {notes[0]}" if notes else "")
    return "the output of a module differs", text, names, [at(line, line_note, True)]


def _headline(one: Compared) -> str:
    return one.losses if one.is_loss_right is False else "another gradient than its rows give"


def _wrong_input(
    one: Compared, found: FirstDifference, module: str, names: tuple[str, ...]
) -> Answer:
    assert found.call is not None
    line = found.call.line
    if not found.call.name and found.before is None:
        rows = example_numbers(one.piece.rows or ())
        text = f"The model is called with other values than those of its rows ({rows})."
        note = f"called with other values than those of {rows}"
        return "the model's input is not its rows", text, names, [at(line, note, True)]
    after = (
        f"After {module_text(found.before)}, whose output is right, and before"
        if found.before
        else "Before"
    )
    text = f"{after} {module}, whose input differs, something changes the values."
    before = at(found.before.line if found.before else None, "its output is right")
    return (
        "values change between two modules",
        text,
        names,
        [before, at(line, f"{module}: its input differs", True)],
    )


def _names(pieces: Pieces, one: Compared) -> tuple[str, ...]:
    """The parameters whose gradients differ from those of the rows, in the order of backward."""
    factors = [1.0] if one.loss_factor is None else [one.loss_factor, 1.0]
    best: list[str] = []
    for number, factor in enumerate(factors):
        wrong = []
        for name, place in pieces.view.parameters.places.items():
            found, right = one.piece.gradient[place], factor * one.gradient_alone[place]
            if not float((found - right).norm()) <= 10 * pieces.tolerance * float(right.norm()):
                wrong.append(name)
        if number == 0 or len(wrong) < len(best):
            best = wrong
    last: dict[str, int] = {}
    for call in calls_of(pieces, one.piece):
        last[call.name] = max(call.order[1], last.get(call.name, 0))
    return tuple(sorted(best, key=lambda name: last.get(name.rpartition(".")[0], 0), reverse=True))


def _which_piece(pieces: Pieces, wrong: Sequence[Compared]) -> str:
    """Which backward passes, if not all of a rank."""
    counts = {len(of_rank) for of_rank in pieces.by_rank}
    numbers = sorted({one.piece.number for one in wrong})
    if counts == {1} or len(numbers) == max(counts):
        return ""
    shown = ", ".join(str(number + 1) for number in numbers)
    return f" That is so in backward pass {shown} of {max(counts)}."


def _loss_line(one: Compared) -> PointedLine | None:
    line = one.piece.call.made_at if one.piece.call else None
    is_wrong = one.is_loss_right is False
    return at(line, f"the loss: {one.losses}" if is_wrong else "the loss", is_wrong)


def _backward_line(one: Compared) -> PointedLine | None:
    call = one.piece.call
    if call is None:
        return None
    is_told = call.made_at is not None or one.is_loss_right is not False
    note = "backward begins" if is_told else f"backward begins here: {one.losses}"
    return at(line_of(call), note, not is_told)


# What a forward pass reads beside its rows: weights, buffers, and attributes of modules.


def _changed_before(
    pieces: Pieces, piece: Piece, found: FirstDifference | None
) -> list[PointedLine]:
    """The lines that changed, before this backward pass, weights, or buffers and attributes of the
    first module that is not as its rows alone make it.
    """
    if piece.call is None:
        return []
    module = found.call.name if found is not None and found.call is not None else None
    if module is not None and found is not None and found.what == "input":
        module = module.rpartition(".")[0]  # what is around it makes its input
    return changes_before(pieces.view.observed.by_rank[piece.rank], piece.call, module)


def changes_before(seen: Observation, backward: Call, module: str | None) -> list[PointedLine]:
    """The lines that changed what a forward pass reads: weights, and buffers and attributes of one
    module. A line in a function that leaves backward to its caller stands for the caller's line.
    """
    lines = dict[object, PointedLine]()
    forwards = {line_of(call) for call in seen.calls if _runs_model(call)}
    for call in seen.calls:
        line = line_of(call)
        if (call.step, call.backwards) > (backward.step, backward.backwards) or line is None:
            continue
        if call.kind is Kind.WEIGHTS and call.step == backward.step and not call.in_backward:
            note = f"changes {named(call.names)} before backward" if call.what else ""
            met = meeting_lines(call, backward)
            if met is not None and met[0] != line:
                line, note = met[0], note and f"line {line.number} {note}"
        elif call.kind is Kind.BUFFERS and line not in forwards and _of(module, call.names):
            note = f"changes {named(_of(module, call.names))} before the forward pass"
        elif call.kind is Kind.MODULE_STATE and _of(module, call.names):
            note = f"sets {call.what} on {_of(module, call.names)[0] or 'the model'}"
        else:
            continue
        lines.pop(line, None)
        if note:
            lines[line] = PointedLine(line, note, is_fault=call.kind is not Kind.MODULE_STATE)
        else:  # the weights are those of the case again
            lines = {one: known for one, known in lines.items() if "backward" not in known.note}
    return list(lines.values())[-MOST_CHANGES:]


def _runs_model(call: Call) -> bool:
    return call.kind in (Kind.FORWARD, Kind.WRAP)


def _of(module: str | None, names: Sequence[str]) -> list[str]:
    """Those names that are of a module, of one around it or of one inside it."""
    if module is None:
        return []
    return [
        name
        for name in names
        if not (name and module)
        or f"{name}.".startswith(f"{module}.")
        or f"{module}.".startswith(f"{name}.")
    ]


# Only the way back is wrong: the losses are those of the rows, and the reduction is a mean.


def backward_alone_is_wrong(view: View) -> bool:
    """True if every rank holds the mean of what the ranks computed, and every backward pass began
    at the loss of its rows. What differs then came in between.
    """
    if not view.observed.by_rank or view.world_size == 1:
        return False
    pieces = pieces_of(view)
    if pieces is None or not pieces.all or pieces.is_coarse:
        return False
    held = view.measured.by_rank
    mean = view.on_every_rank(pieces.own.mean(0))
    return unexplained(held, mean) <= pieces.tolerance and losses_are_right(pieces)


def losses_are_right(pieces: Pieces) -> bool:
    """True if every backward pass began at the loss of its rows."""
    for piece in pieces.all:
        alone = pieces.alone(piece)
        if alone is None or piece.loss is None:
            return False
        if abs(piece.loss - alone.loss) > max(SAME_LOSS, pieces.tolerance) * abs(alone.loss):
            return False
    return True


def backward_lines(pieces: Pieces, piece: Piece) -> list[PointedLine | None]:
    """The backward methods of the user's own that ran in a backward pass, and the last hook."""
    hooks = pieces.view.observed.calls.places(Kind.HOOK, Kind.TENSOR_HOOK)
    own = own_backward_lines(pieces.view.observed.by_rank[piece.rank], piece.call)
    return [*own, *(one.pointed("a hook on the way back", True) for one in hooks[-1:])]


def own_backward_lines(seen: Observation, backward: Call | None) -> list[PointedLine]:
    """The backward methods of the user's own that ran, those first that withheld a gradient."""
    own: dict[str, PointedLine] = {}
    for one in sorted(seen.own_backwards, key=lambda one: not one.withheld):
        if backward is None or (one.step, one.backwards) != (backward.step, backward.backwards + 1):
            continue
        note = f"the gradient that {one.name} gives back"
        if one.withheld:
            note = f"{WITHHOLDS} for input {one.withheld[0]} of {one.name}, which needs one"
        own.setdefault(one.name, PointedLine(one.line, note, is_fault=True))
    return list(own.values())


# A backward pass adds to gradients that would be right without it, as one through another's loss.
#
# In adversarial training, for example, the generator's loss also reaches the weights of the
# critic.


def fault_of_a_pass(pieces: Pieces, uniform: float) -> Whereabouts | None:
    """The pass of each rank that is one too many; None if leaving out one changes nothing.

    ``uniform``: every rank holds this many times what all ranks have computed together.
    """
    view, counts = pieces.view, {len(of_rank) for of_rank in pieces.by_rank}
    names = [name for name in view.parameters.names if name in view.measured.differing]
    if len(counts) != 1 or min(counts) < 2 or not names:
        return None
    elements = view.parameters.positions_of(names)
    total, right = pieces.own.sum(0)[elements], view.expected[elements]
    found = []
    for number in range(counts.pop()):
        added = torch.stack([of_rank[number].gradient for of_rank in pieces.by_rank]).sum(0)
        rest = uniform * (total - added[elements])
        is_right = float((rest - right).norm()) <= pieces.tolerance * float(right.norm())
        if is_right and bool(added[elements].any()):
            found.append(number)
    if len(found) != 1:
        return None
    lines = [
        at(
            line_of(piece.call),
            f"adds to the gradients of {named(names)}, which are right without it"
            if piece.number == found[0]
            else "another backward pass",
            piece.number == found[0],
        )
        for piece in pieces.by_rank[0]
        if piece.call is not None
    ]
    gradients = of_all(names, view.parameters.names)
    return Whereabouts(
        kind="own gradient",
        headline="one backward pass too many reaches some parameters",
        sentence=f"Without what one of the backward passes adds, {gradients} would be right.",
        lines=distinct(lines),
        parameters=tuple(names),
        ranks=tuple(view.setting.reporting_ranks),
        fix="keep this backward pass from these parameters, or clear what it leaves there.",
        explains_all=True,
    )


# What the forward passes alone show, where the gradients of backward passes are not known.


def forward_alone(view: View) -> Whereabouts | None:
    """Compares modules and losses with those of the rows alone; None if that cannot be done.

    The gradients of sharded parameters, for instance, are not known before they are reduced.
    """
    pieces = pieces_of(view, without_gradients=True)
    if pieces is None or not pieces.all or pieces.is_coarse:
        return None
    wrong, known = [], 0
    for piece in pieces.all:
        alone = pieces.alone(piece)
        found = first_difference(pieces, piece) if alone is not None else None
        if alone is None or found is None:
            continue
        known += 1
        compared = Compared(piece, None, alone.gradient, alone.loss)
        factor = compared.loss_factor
        tolerance = max(SAME_LOSS, pieces.tolerance)
        if found.what != "none" or (factor is not None and abs(factor - 1) > tolerance):
            wrong.append(compared)
    unseen = "what backward computed on each rank, before it was reduced, was not recorded"
    if not wrong:
        if known < len(pieces.all):
            return None
        seen = "the modules and losses of all ranks are those of their rows"
        calls = [piece.call for piece in pieces.by_rank[0] if piece.call is not None]
        lines = distinct([at(line_of(call), "the loss is right here") for call in calls[:1]])
        return replace(not_seen(f"{seen}; {unseen}"), lines=lines)
    found_there = fault_of_own_gradient(pieces, wrong, "other outputs or losses")
    return replace(
        found_there,
        sentence=f"{found_there.sentence} It is not known whether this is all, since {unseen}.",
        parameters=(),
    )


def idle_ranks(pieces: Pieces) -> Whereabouts | None:
    """Ranks that were given rows and computed no gradient of their model; None if all did."""
    view = pieces.view
    shards = view.setting.shards
    if shards is None:
        return None
    idle = tuple(
        rank for rank, of_rank in enumerate(pieces.by_rank) if not of_rank and shards[rank]
    )
    if not idle or len(idle) == view.world_size:
        return None
    who = ranked(idle, view.world_size)
    ran = all(view.observed.backwards(rank) for rank in idle)
    missed = "backward reaches no parameter of the model" if ran else "no backward pass"
    last = next((line_of(one) for one in reversed(view.observed.calls.of(idle[0]))), None)
    return Whereabouts(
        "own gradient",
        f"{who}: {missed}",
        f"{who[:1].upper()}{who[1:]} computed no gradient of the model that the step was given.",
        distinct(
            [
                *lines_only_on(view.observed.by_rank, idle),
                *(one.pointed(f"on {who}: {missed}") for one in view.observed.calls.backwards[:1]),
                at(last, f"the last recorded call of {who}"),
            ]
        ),
        view.parameters.names,
        idle,
    )


# Where gradients are missing on some ranks: which modules these never called.


def where_gradients_are_missing(
    observed: Mapping[int, Observation], names: Sequence[str], view: View | None
) -> Whereabouts | None:
    """None if they are not. ``names``: the parameters that have a gradient in the big batch.

    ``view``: of the step, if there is one of it before it ran.
    """
    missing = {rank: _missing(seen, names) for rank, seen in observed.items()}
    ranks = tuple(rank for rank, of_rank in missing.items() if of_rank)
    if not ranks:
        return None  # what the step returned lacks them, or they have another shape
    gone, seen = missing[ranks[0]], observed[ranks[0]]
    who = ranked(ranks, len(observed))
    backwards = [call for call in seen.calls if call.kind is Kind.BACKWARD]
    text, lines = _why_missing(seen, gone, backwards, ranks[0])
    is_seen = bool(lines)
    if backwards and not lines:
        lines += changes_before(seen, backwards[-1], gone[0].rpartition(".")[0])
    if view is not None and not lines:
        reduced = [one for one in view.observed.calls.reductions if ranks[0] in one.by_rank]
        lines = [one for place in reduced[-1:] for one in lines_that_left_out(view, place)]
    last = [line_of(call) for call in seen.calls][-1:]
    several = f"{len(gone)} gradients are" if len(gone) > 1 else f"the gradient of {gone[0]} is"
    only_there = lines_only_on(observed, ranks)
    return Whereabouts(
        "own gradient",
        f"{several} missing",
        f"{text} {who[:1].upper()}{who[1:]} left no gradient of {named(gone)}.",
        distinct(
            [
                *lines,
                *only_there,
                *(at(line_of(call), "backward began here") for call in backwards[-1:]),
                *(at(line, f"the last recorded call of rank {ranks[0]}") for line in last),
            ]
        ),
        tuple(gone),
        ranks,
        shows_later=not is_seen and not only_there,
    )


def _why_missing(
    seen: Observation, gone: Sequence[str], backwards: Sequence[Call], rank: int
) -> tuple[str, list[PointedLine | None]]:
    """What was recorded that keeps gradients from these parameters, and its lines."""
    if not backwards:
        return f"No backward pass ran on rank {rank}.", []
    last: dict[str, Call] = {}
    for call in seen.calls:
        if call.kind is Kind.REQUIRES_GRAD:
            last |= dict.fromkeys(call.names, call)
    frozen = {n: last[n] for n in gone if n in last and last[n].what.endswith("False")}
    if frozen:
        what = f"sets requires_grad of {named(list(frozen))} to False"
        places = dict.fromkeys(line_of(call) for call in frozen.values())
        return f"A line {what}.", [at(place, what, True) for place in places]
    module = gone[0].rpartition(".")[0]
    calls = [one for one in seen.trace.module_calls if one.name == module]
    if calls and not any(one.with_gradients for one in calls):
        without = [one for one in seen.trace.module_calls if not one.with_gradients]
        around = [one for one in without if f"{module}.".startswith(f"{one.name}.")] or calls
        outermost = min(around, key=lambda one: len(one.name))
        text = f"{module or 'The model'} is called only where gradients are turned off."
        return text, [
            at(outermost.line, f"calls {module_text(outermost)} without gradients", True),
            at(calls[-1].line, f"calls {module_text(calls[-1])} without gradients"),
        ]
    own = [one for one in own_backward_lines(seen, backwards[-1]) if one.note.startswith(WITHHOLDS)]
    if own:
        return f"Line {own[0].line.number} {own[0].note}.", [*own]
    if not calls and any(one.name != module for one in seen.trace.module_calls):
        return f"The module {module or 'itself'} is not called on rank {rank}.", []
    return f"Backward passes ran on rank {rank}, and none left these gradients.", []


def _missing(seen: Observation, names: Sequence[str]) -> list[str]:
    """The parameters that had no gradient when the second run ended, in their order."""
    last: dict[str, bytes] = {}
    for state in seen.trace.states:
        last |= state.values
    if not seen.trace.complete:
        return []
    return [name for name in names if not last.get(name, b"")]
