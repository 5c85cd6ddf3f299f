"""A rank's own gradient is not what its rows give: which rank, and from where on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.examples_read import example_numbers
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.whereabouts.cut_graph import CutGraph, cut_graph
from ddp_equivalence.diagnosis.whereabouts.exchanges import exchange_lines
from ddp_equivalence.diagnosis.whereabouts.gradient_path import line_of
from ddp_equivalence.diagnosis.whereabouts.module_state import (
    lines_of_mode,
    lines_of_state,
    mode_text,
    other_mode,
)
from ddp_equivalence.diagnosis.whereabouts.output_notes import notes_of_output
from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces
from ddp_equivalence.diagnosis.whereabouts.rank_lines import lines_only_on
from ddp_equivalence.diagnosis.whereabouts.replay import FirstDifference, calls_of, first_difference
from ddp_equivalence.diagnosis.whereabouts.station_text import at, module_text
from ddp_equivalence.diagnosis.whereabouts.weight_lines import lines_of_weights, weights_text
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, named, ranked
from ddp_equivalence.diagnosis.whereabouts.without_gradients import agreement, without_gradients
from ddp_equivalence.measurement.calls import Kind

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
