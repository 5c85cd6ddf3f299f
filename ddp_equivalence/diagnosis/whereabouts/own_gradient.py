"""A rank's own gradient is not what its rows give: which rank, and from where on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.examples_read import example_numbers
from ddp_equivalence.diagnosis.lines.of_loss import buffer_changes, buffers_apart
from ddp_equivalence.diagnosis.lines.origins import chosen, gone_through
from ddp_equivalence.diagnosis.lines.source_tree import RunLines, meeting_lines
from ddp_equivalence.diagnosis.residual import unexplained
from ddp_equivalence.diagnosis.setting import PointedLine, reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.cut_graph import (
    SAME,
    CutGraph,
    cut_graph,
    cut_graph_of,
    leaf_line,
    off_lines,
    own_backward_lines,
)
from ddp_equivalence.diagnosis.whereabouts.forward_faults import (
    exchange_lines,
    lines_of_mode,
    lines_of_state,
    mode_text,
    other_mode,
    wrong_mode,
)
from ddp_equivalence.diagnosis.whereabouts.gradient_mix import lines_only_on
from ddp_equivalence.diagnosis.whereabouts.gradient_path import at, line_of, module_text
from ddp_equivalence.diagnosis.whereabouts.pieces import (
    FirstDifference,
    Piece,
    Pieces,
    Replay,
    agree,
    calls_of,
    eps_of,
    first_difference,
    notes_of_output,
    pieces_of,
    replay_of,
    tolerance_in,
)
from ddp_equivalence.diagnosis.whereabouts.whereabouts import (
    Whereabouts,
    distinct,
    named,
    not_seen,
    ranked,
)
from ddp_equivalence.measurement.calls import Call, Kind, ModuleCall
from ddp_equivalence.measurement.observation import Observation

MOST_REPLAYED = 8
"""The forward passes of so many pieces are replayed."""

RIGHT = "the outputs are right"

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
    if len(ranks) > 1:
        sentence = f"On rank {one.piece.rank}, {sentence}"
    else:
        sentence = f"{sentence[:1].upper()}{sentence[1:]}"
    changed = lines_of_weights(pieces.view, one.piece.rank, one.piece.call)
    if changed:
        sentence = f"{weights_text(pieces.view, one.piece.rank)} {sentence}"
        lines = [*changed, *lines]
    only_there = lines_only_on(pieces.view.observed.by_rank, ranks)
    exchanges = exchange_lines(pieces, one.piece) if len(ranks) == world_size else []
    of_loss = [_loss_line(one), _backward_line(one)]
    marked = [line for line in (*only_there, *exchanges, *lines) if line and line.is_fault]
    between_modules = found is not None and found.what == "input"
    return Whereabouts(
        kind="own gradient",
        shows_later=between_modules or all(line in of_loss for line in marked),
        headline=f"{who if len(ranks) in (1, world_size) else f'{len(ranks)} ranks'}: {headline}",
        sentence=f"{sentence} {whole}",  # a short report shows the first 95 characters
        lines=distinct([*only_there, *exchanges, *lines]),
        parameters=names,
        ranks=ranks,
    )


Told = tuple[str, str, tuple[str, ...], list[PointedLine | None]]
"""A headline, a clause, the parameters and the lines."""


def _from_where(pieces: Pieces, one: Compared, found: FirstDifference | None) -> Told:
    """From where on the piece is wrong."""
    names = _names(pieces, one)
    backward = _backward_line(one)
    if found is None or found.what != "none":
        mode = other_mode(pieces, one.piece)
        if mode is not None:
            text = f"{mode_text(mode)}."
            setting = lines_of_mode(pieces.view.observed.by_rank[one.piece.rank], mode)
            called = at(mode.line, "it is called here", not setting)
            return "a module is in another mode", text, names, [*setting, called, backward]
    if found is None:
        cut = cut_graph(pieces, one.piece, one.loss_factor)
        if cut is not None:
            return _where_cut(one, cut, names)
        text = f"the forward pass could not be compared with its rows alone; {_loss_text(one)}"
        return "another gradient than its rows give", text, names, [_loss_line(one), backward]
    if found.what == "none":
        return _after_the_model(pieces, one, found)
    call = found.call or found.before
    line = call.line if call else None
    if found.what == "missing":
        text = f"{module_text(found.alone)} is not called, though the loss of its rows calls it."
        last = at(found.before.line if found.before else None, "its output is right")
        then = at(line, f"called without {module_text(found.alone)} before it", True)
        return "a module is not called", text, names, [last, then, backward]
    module = module_text(found.call or found.alone)
    if found.what == "input":
        return _wrong_input(one, found, module, names)
    assert found.call is not None
    assert found.alone is not None
    here, alone = found.call, found.alone
    notes = notes_of_output(pieces, one.piece, here, alone)
    note = f" ({'; '.join(notes)})" if notes else ""
    text = f"the first module whose output differs from that of the same rows is {module}{note}."
    line_note = f"{module}: first output that differs" + (f"; {notes[0]}" if notes else "")
    states = lines_of_state(pieces.view.observed.by_rank[one.piece.rank], here)
    lines = [*states, at(line, line_note, True), _loss_line(one), backward]
    return "the output of a module differs", text, names, lines


def _wrong_input(
    one: Compared, found: FirstDifference, module: str, names: tuple[str, ...]
) -> Told:
    assert found.call is not None
    line, backward = found.call.line, _backward_line(one)
    if not found.call.name and found.before is None:
        rows = example_numbers(one.piece.rows or ())
        text = f"the model is called with other values than those of its rows ({rows})."
        note = f"called with other values than those of {rows}"
        return "the model's input is not its rows", text, names, [at(line, note, True), backward]
    after = (
        f"after {module_text(found.before)}, whose output is right, and " if found.before else ""
    )
    text = f"{after}before {module}, whose input differs, something changes the values."
    return (
        "values change between two modules",
        text,
        names,
        [
            at(found.before.line if found.before else None, "its output is right"),
            at(line, f"{module}: its input differs", True),
            backward,
        ],
    )


def _after_the_model(pieces: Pieces, one: Compared, found: FirstDifference) -> Told:
    """All modules return what the rows give: the loss or the backward pass is another one."""
    names = _names(pieces, one)
    factor = one.loss_factor
    beside = without_gradients(pieces, one.piece)
    agree = agreement(found, beside)
    lines: list[PointedLine | None] = [_loss_line(one), _backward_line(one)]
    last = found.before.line if found.before else None
    if factor is not None and not abs(factor - 1) <= SAME_LOSS:  # it may be no number
        text = f"{_loss_text(one)} {agree[:1].upper()}{agree[1:]}."
        other = beside.differs
        other_line = other and at(
            other.line,
            f"without gradients; {module_text(other)} returns other values than for the rows",
        )
        right = at(last, "the outputs with gradients are right" if other else RIGHT)
        shown = [other_line, right] if other else [right]
        return "the loss is not that of its rows", text, names, [*shown, *lines]
    cut = cut_graph(pieces, one.piece, one.loss_factor)
    if cut is not None:
        return _where_cut(one, cut, names)
    rest = [name for name in pieces.view.parameters.names if name not in names]
    hooks = [
        place.pointed("a hook")
        for place in pieces.view.observed.calls.places(Kind.HOOK, Kind.TENSOR_HOOK)
    ]
    text = f"{_loss_text(one)} {agree[:1].upper()}{agree[1:]}. "
    text += f"Backward first leaves the right way at {named(names[:1])}"
    text += f"; {named(rest)} {'are' if len(rest) > 1 else 'is'} right." if rest else "."
    return "backward gives another gradient", text, names, [*hooks[-1:], *lines]


def _where_cut(one: Compared, cut: CutGraph, names: tuple[str, ...]) -> Told:
    text = f"{cut.sentence[:1].lower()}{cut.sentence[1:]} {_loss_text(one).capitalize()}"
    return cut.headline, text, names, [*cut.lines, _backward_line(one)]


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


def _loss_text(one: Compared) -> str:
    factor = one.loss_factor
    if factor is None or one.piece.loss is None:
        return "the loss is not known."
    if abs(factor - 1) <= SAME_LOSS:
        return f"backward began at the loss of its rows, {text_of(one.loss_alone, '.5g')}."
    seen, right = text_of(one.piece.loss, ".5g"), text_of(one.loss_alone, ".5g")
    return f"backward began at {seen}, not at its rows' loss, {right}."


def _loss_line(one: Compared) -> PointedLine | None:
    call = one.piece.call
    line = call.made_at if call else None
    factor = one.loss_factor
    if factor is None or one.piece.loss is None or abs(factor - 1) <= SAME_LOSS:
        return at(line, "the loss")
    seen, right = text_of(one.piece.loss, ".5g"), text_of(one.loss_alone, ".5g")
    return at(line, f"the loss: {seen}, where its rows give {right}", True)


def _backward_line(one: Compared) -> PointedLine | None:
    call = one.piece.call
    factor = one.loss_factor
    line = line_of(call) if call else None
    known = call is not None and call.made_at is not None  # then that line tells of the loss
    if known or factor is None or one.piece.loss is None or abs(factor - 1) <= SAME_LOSS:
        return at(line, "backward begins")
    seen, right = text_of(one.piece.loss, ".5g"), text_of(one.loss_alone, ".5g")
    return at(line, f"backward begins at {seen}; its rows give {right}", True)


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
        if abs(piece.loss - alone.loss) > max(SAME, pieces.tolerance) * abs(alone.loss):
            return False
    return True


def backward_lines(pieces: Pieces) -> list[PointedLine]:
    """The backward methods of the user's own that ran on the first rank, and the last hook."""
    hooks = [
        place.pointed("a hook on the way back", is_fault=True)
        for place in pieces.view.observed.calls.places(Kind.TENSOR_HOOK)
    ]
    return [*own_backward_lines(pieces, pieces.all[0]), *hooks[-1:]]


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
    idle = tuple(rank for rank, of_rank in enumerate(pieces.by_rank) if not of_rank)
    idle = tuple(rank for rank in idle if shards[rank])
    if not idle or len(idle) == view.world_size:
        return None
    who = ranked(idle, view.world_size)
    if all(view.observed.backwards(rank) for rank in idle):
        headline = "backward misses the model" if len(idle) == 1 else "backward misses their model"
        seen = "ran backward, and it reached no parameter of the model that the step was given."
        note = f"reaches no parameter of the model on {who}"
    else:
        headline = "no backward pass" if len(idle) == 1 else "no backward pass there"
        seen = "computed no gradient, though it was given rows."
        note = f"a backward pass, but not on {who}"
    last = next((line_of(one) for one in reversed(view.observed.calls.of(idle[0]))), None)
    return Whereabouts(
        "own gradient",
        f"{who}: {headline}",
        f"{who[:1].upper()}{who[1:]} {seen}",
        distinct(
            [
                *lines_only_on(view.observed.by_rank, idle),
                *(one.pointed(note) for one in view.observed.calls.backwards[:1]),
                at(last, f"the last recorded call of {who}"),
            ]
        ),
        view.parameters.names,
        idle,
    )


# Where gradients are missing on some ranks: which modules these never called.


def where_gradients_are_missing(
    observed: Mapping[int, Observation], names: Sequence[str], replay: Replay | None = None
) -> Whereabouts | None:
    """None if they are not. ``names``: the parameters that have a gradient in the big batch.

    ``replay``: what the loss of the case does; None if that is not known.
    """
    missing = {rank: _missing(seen, names) for rank, seen in observed.items()}
    ranks = tuple(rank for rank, of_rank in missing.items() if of_rank)
    if not ranks:
        return None  # what the step returned lacks them, or they have another shape
    gone = missing[ranks[0]]
    who = ranked(ranks, len(observed))
    seen = observed[ranks[0]]
    backwards = [call for call in seen.calls if call.kind is Kind.BACKWARD]
    calls = [call for call in seen.trace.module_calls if call.with_gradients]
    called = {call.name for call in calls}
    module = gone[0].rpartition(".")[0]
    headline, reasons = "", list[PointedLine | None]()
    if not backwards:
        text = f"No backward pass ran on {who}."
    elif backwards and (why := _why(seen, gone, calls, backwards[-1], replay)) is not None:
        headline, text, reasons = why
    elif called and module not in called:
        text = f"The module {module or 'itself'} is not called on rank {ranks[0]}."
    else:
        text = f"Backward passes ran on rank {ranks[0]}, and none left these gradients."
    last = [line_of(call) for call in seen.calls][-1:]
    return Whereabouts(
        "own gradient",
        (f"{headline}, and " if headline else "")
        + (f"{len(gone)} gradients are" if len(gone) > 1 else "the gradient of a parameter is")
        + " missing",
        f"{text} {who[:1].upper()}{who[1:]} left no gradient of {named(gone)}.",
        distinct(
            [
                *reasons,
                *lines_only_on(observed, ranks),
                *_gone_through(seen, backwards),
                *(at(line_of(call), "backward began here") for call in backwards[-1:]),
                *(at(line, f"the last recorded call of rank {ranks[0]}") for line in last),
            ]
        ),
        tuple(gone),
        ranks,
    )


def _gone_through(seen: Observation, backwards: Sequence[Call]) -> list[PointedLine | None]:
    """The line of the user's that chose what the loop around the last reduction goes through."""
    lines = tuple(line for call in backwards if (line := line_of(call)) is not None)
    run = RunLines(seen.trace.times_run or {}, seen.trace.lines_run or {}, lines)
    reductions = [one for one in seen.calls if reduces_gradients(one) and not one.in_backward]
    for call in reductions[-1:]:
        line = line_of(call)
        if line is not None:
            link = chosen(gone_through(run, (line, *call.callers)))
            note = f"chooses what the loop of line {line.number} goes through"
            return [at(link.line, note)] if link is not None and link.line != line else []
    return []


Why = tuple[str, str, list[PointedLine | None]]
"""A headline, a sentence and the lines."""


def _why(
    seen: Observation,
    gone: Sequence[str],
    calls: Sequence[ModuleCall],
    backward: Call,
    replay: Replay | None,
) -> Why | None:
    """What was recorded that keeps gradients from these parameters; None if nothing was."""
    frozen = _frozen(seen, gone)
    if frozen:
        what = f"sets requires_grad of {named(list(frozen))} to False"
        places = dict.fromkeys(line_of(call) for call in frozen.values())
        pointed = [
            at(place, what if len(places) == 1 else "freezes some", True) for place in places
        ]
        return "parameters are frozen", f"A line {what}.", pointed
    module = gone[0].rpartition(".")[0]
    mode = None if replay is None else wrong_mode(calls, replay.with_gradients)
    if mode is not None:
        lines = lines_of_mode(seen, mode)
        called = at(mode.line, "it is called here", not lines)
        text = mode_text(mode)
        return "a module is in another mode", f"{text[:1].upper()}{text[1:]}.", [*lines, called]
    without = [
        call
        for call in seen.trace.module_calls
        if call.name == module and not call.with_gradients and call.backwards == backward.backwards
    ]
    if without and module not in {call.name for call in calls}:
        text = f"{module or 'The model'} is called only where gradients are turned off."
        line = without[-1].line
        called = at(line, "called where gradients are turned off", True)
        off = off_lines(without[-1].off_at, line) if line is not None else []
        return "a module runs without gradients", text, [*off, called]
    cut = cut_graph_of(seen, backward.step, backward.backwards, replay)
    if cut is not None:
        return cut.headline, cut.sentence, list(cut.lines)
    leaf = leaf_line(seen, backward.step, backward.backwards)
    text = "A line makes a new leaf of a tensor that has a gradient."
    return None if leaf is None else ("a tensor was made a leaf", text, [leaf])


def _frozen(seen: Observation, gone: Sequence[str]) -> dict[str, Call]:
    """Those of the parameters that were frozen last -> the call that did it."""
    last: dict[str, Call] = {}
    for call in seen.calls:
        if call.kind is Kind.REQUIRES_GRAD:
            last |= dict.fromkeys(call.names, call)
    return {name: last[name] for name in gone if name in last and last[name].what.endswith("False")}


def _missing(seen: Observation, names: Sequence[str]) -> list[str]:
    """The parameters that had no gradient when the second run ended, in their order."""
    last: dict[str, bytes] = {}
    for state in seen.trace.states:
        last |= state.values
    if not seen.trace.complete:
        return []
    return [name for name in names if not last.get(name, b"")]


# The lines that gave a rank other weights than those of the case, before its backward pass.

MOST_WEIGHT_LINES = 2


def lines_of_weights(view: View, rank: int, backward: Call | None = None) -> list[PointedLine]:
    """The lines of this step after which a rank held other weights, before any backward pass.

    [] if it held the weights of the case again in the end. ``backward``: of a function of the
    user's that changes them for a caller which then calls backward, the line of the caller.
    """
    places = view.observed.calls.places(
        Kind.WEIGHTS, where=lambda call: not call.backwards and not call.in_backward
    )
    of_rank = [place for place in places if rank in place.by_rank]
    changes = [
        call
        for call in view.observed.calls.of(rank)
        if call.kind is Kind.WEIGHTS and not call.backwards
    ]
    if not changes or not changes[-1].what:
        return []
    lines: dict[tuple[str, int], PointedLine] = {}
    for place in of_rank[:MOST_WEIGHT_LINES]:
        text = f"changes {_some(place.names)} before backward"
        met = meeting_lines(place.by_rank[rank][0], backward) if backward is not None else None
        line = place.line if met is None else met[0]
        where = "" if line == place.line else f"line {place.line.number} "
        lines.setdefault((line.file, line.number), PointedLine(line, f"{where}{text}", True))
    return list(lines.values())


def weights_text(view: View, rank: int) -> str:
    """What these lines changed, as a sentence; "" if there are none."""
    if not lines_of_weights(view, rank):
        return ""
    names = dict.fromkeys(
        name
        for call in view.observed.calls.of(rank)
        if call.kind is Kind.WEIGHTS and not call.backwards
        for name in call.names
    )
    return f"Before backward, the step changes {_some(list(names))}."


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} parameters, such as {names[0]}"


# The forward passes of the ranks read other buffers than that of the big batch does.

MOST_COMPARED = 16
"""The gradients of so many pieces are computed again."""

MOST_BUFFER_LINES = 2


def fault_of_buffers(pieces: Pieces, wrong: Sequence[Compared]) -> Whereabouts | None:
    """Says that buffers are the difference; None unless each of these pieces has the gradient that
    its rows give with the buffers of its rank.
    """
    changes = buffer_changes(pieces.view)
    if not changes or not all(_is_of_buffers(pieces, one.piece) for one in wrong[:MOST_COMPARED]):
        return None
    changed = dict.fromkeys(name for place in changes for name in place.names)
    apart = buffers_apart(pieces.view)
    names = [name for name in changed if name in apart] or list(changed)
    ranks = tuple(sorted({one.piece.rank for one in wrong}))
    who = ranked(ranks, pieces.view.world_size)
    verb = "computes" if len(ranks) in (1, pieces.view.world_size) else "compute"
    differ = "differ between the ranks" if apart else "are not those of the big batch"
    after = ", which differs between the ranks afterwards" if apart else ""
    lines = [
        at(place.line, f"changes {named(place.names)}{after}", True)
        for place in changes
        if set(place.names) & set(names)
    ]
    return Whereabouts(
        kind="own gradient",
        headline=f"buffers {differ}",
        sentence=f"{who[:1].upper()}{who[1:]} {verb} what its rows give with the buffers that it "
        f"has: {named(names)}. Before the forward pass, buffers {differ}.",
        lines=distinct(lines[:MOST_BUFFER_LINES]),
        ranks=ranks,
        fix="reduce these buffers over all ranks wherever a rank changes them.",
    )


def _is_of_buffers(pieces: Pieces, piece: Piece) -> bool:
    """True if the gradient of a piece is that of its rows, with the buffers of its rank."""
    if piece.rows is None or piece.forward is None or not piece.forward.buffers:
        return False
    generator = piece.forward.generator if pieces.view.setting.draws_on_cpu else b""
    found = pieces.view.examples.with_buffers(piece.rows, generator, piece.forward.buffers)
    return pieces.factor_between(piece.gradient, found.gradient) is not None


# Modules that ran where gradients are turned off, such as a teacher, beside their rows alone.

SAME_OUTPUT = 1e-5
"""Values whose relative difference is smaller are equal."""


@dataclass(frozen=True)
class WithoutGradients:
    """``all_agree``: every such call was compared with the same call of the loss of the case, and
    returned the same; True also where there was none. ``differs``: the first one that returned
    something else. ``same_input``: it was given the same.
    """

    all_agree: bool
    differs: ModuleCall | None = None
    same_input: bool = False


def without_gradients(pieces: Pieces, piece: Piece) -> WithoutGradients:
    """The calls of a piece where gradients are turned off, beside those of its rows alone.

    A module that was called more or less often than there is not compared.
    """
    here = sorted(calls_of(pieces, piece, without_gradients=True), key=lambda one: one.order[1])
    replay = replay_of(pieces, piece) if here else None
    if replay is None:
        return WithoutGradients(all_agree=not here)
    alone: dict[str, list[ModuleCall]] = {}
    for call in sorted(replay.calls, key=lambda one: one.order[1]):
        if not call.with_gradients:
            alone.setdefault(call.name, []).append(call)
    times = Counter(call.name for call in here)
    met: Counter[str] = Counter()
    complete = True
    for call in here:
        others = alone.get(call.name, [])
        if len(others) != times[call.name]:
            complete = False
            continue
        other = others[met[call.name]]
        met[call.name] += 1
        if call.returned is None or other.returned is None:
            complete = False
        elif not agree(call.returned, other.returned, _tolerance(pieces, call.returned.dtype)):
            same = call.given is not None and other.given is not None
            same = same and agree(call.given, other.given, _tolerance(pieces, ""))
            return WithoutGradients(all_agree=False, differs=call, same_input=same)
    return WithoutGradients(complete)


def agreement(found: FirstDifference, beside: WithoutGradients) -> str:
    """Which modules return what the rows give, as a clause."""
    if not found.before:
        return "no module was heard" if beside.differs is None else _not_as_alone(beside)
    if beside.differs is not None:
        return f"all modules with gradients return what the rows give; {_not_as_alone(beside)}"
    whose = "" if beside.all_agree else " that ran with gradients"
    return f"all modules{whose} return what the rows give"


def _not_as_alone(beside: WithoutGradients) -> str:
    same = ", for the same input" if beside.same_input else ""
    return f"without gradients {module_text(beside.differs)} returns other values{same}"


def _tolerance(pieces: Pieces, dtype: str) -> float:
    return max(pieces.tolerance, SAME_OUTPUT, tolerance_in(eps_of(dtype)) if dtype else 0.0)
