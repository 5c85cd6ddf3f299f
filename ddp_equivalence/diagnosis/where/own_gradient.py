"""A rank's own gradient is not what its rows give: which rank, and from where on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.lines.decisions import meeting_lines
from ddp_equivalence.diagnosis.lines.of_reduction import lines_that_left_out
from ddp_equivalence.diagnosis.lines.words import names_text
from ddp_equivalence.diagnosis.residual import unexplained
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.where.gradient_path import (
    at,
    line_of,
    lines_of_the_loss,
    lines_only_on,
)
from ddp_equivalence.diagnosis.where.pieces import SAME_LOSS, Piece, Pieces, pieces_of, same_loss
from ddp_equivalence.diagnosis.where.whereabouts import (
    MOST_RANKS,
    Whereabouts,
    distinct,
    not_seen,
    ranked,
)
from ddp_equivalence.measurement.calls import Call, Kind
from ddp_equivalence.measurement.graph_watch import OwnBackward
from ddp_equivalence.measurement.observation import Observation

MOST_CHANGES = 2

MOST_DIGITS = 10
"""Losses that agree in so many digits differ by rounding."""

NO_LOSS = 1e-12
"""Losses that differ by less are equal: both may be zero up to rounding."""


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
        return None if factor is None else same_loss(factor, 1.0)

    def has_its_share(self, pieces: Pieces) -> bool:
        """True if its gradient is that of its rows, or this divided by how many its rank has."""
        passes = len(pieces.by_rank[self.piece.rank])
        factor = self.factor or 0.0
        return any(abs(factor * times - 1) <= pieces.tolerance for times in (1, passes))

    @property
    def losses(self) -> str:
        """Both losses: ``its loss is 1.8, its own rows give 0.9``."""
        alone = text_of(self.loss_alone, ".5g")
        if self.piece.loss is None:
            return f"its own rows give the loss {alone}"
        if self.is_loss_right:
            return f"its loss is that of its own rows, {alone}"
        return "its loss is {}, its own rows give {}".format(
            *_apart(self.piece.loss, self.loss_alone)
        )


@dataclass(frozen=True)
class Judged:
    """The loss of a piece beside the right one, as text for a headline, a sentence, and the note on
    a line. ``is_wrong``: it is another one. ``of_all``: the losses of all pieces together are what
    was judged.
    """

    headline: str
    sentence: str
    note: str
    is_wrong: bool
    of_all: bool = False


def _apart(one: float, other: float) -> tuple[str, str]:
    """Both losses with five digits, or with as many more as it takes to tell them apart."""
    for digits in range(5, MOST_DIGITS):
        texts = text_of(one, f".{digits}g"), text_of(other, f".{digits}g")
        if texts[0] != texts[1]:
            return texts
    return text_of(one, ".5g"), text_of(other, ".5g")


def _judged(pieces: Pieces, compared: Sequence[Compared], one: Compared) -> Judged:
    """Hold the loss of a piece against that of its rows. If most pieces are not what their rows
    give, all together are held against the loss of the big batch: a right step may divide by counts
    of all ranks.
    """
    rank, weight = one.piece.rank, pieces.uniform_weight
    known = [other.piece.loss for other in compared if other.piece.loss is not None]
    of_rows = sum(bool(one.is_loss_right) or one.has_its_share(pieces) for one in compared)
    together = pieces.loss_together
    right = pieces.view.examples.big_batch_loss
    if weight is None or together is None or 2 * of_rows >= len(compared):
        headline = f"rank {rank}: {one.losses}"
        is_wrong = one.is_loss_right is False
        if len(known) == len(compared) == pieces.view.world_size:  # one loss on each rank
            is_wrong = is_wrong and not _make_up(known, right)
            if not _make_up([other.loss_alone for other in compared], right):
                numbers = _apart(sum(known) / len(known), right)
                headline = "the ranks' mean loss is {}, the big batch's {}".format(*numbers)
        return Judged(headline, "", one.losses, is_wrong)
    rounding = pieces.tolerance * max(map(abs, known))
    size = max(SAME_LOSS * abs(right), pieces.tolerance * abs(right), rounding, NO_LOSS)
    together, right = (0.0 if abs(one) <= rounding else one for one in (together, right))
    other = [one for one in compared if not abs((one.piece.loss or 0.0) - right) <= size]
    shown = ", ".join(text_of(loss, ".4g") for loss in known[:MOST_RANKS])
    every = f"{shown}, ..." if len(known) > MOST_RANKS else shown
    unit = "ranks'" if len(known) == pieces.view.world_size else "backward passes'"
    alike = max(known) - min(known) <= size
    if len(other) < len(compared) or alike:  # every rank is to have the loss of the big batch
        rank, loss = (other or compared)[0].piece.rank, (other or compared)[0].piece.loss
        number, of_all = _apart(loss or 0.0, right)
        of_big_batch = f"the big batch's {of_all}"
        headline = f"rank {rank}: its loss is {number}, {of_big_batch}"
        sentence = f"The {unit} losses are {every}; {of_big_batch}. "
        if alike and len(other) == len(compared) > 1:
            headline, sentence = f"every rank's loss is {number}, {of_big_batch}", ""
    else:
        is_mean = len(known) == pieces.view.world_size and same_loss(weight * len(known), 1.0)
        what = "mean" if is_mean else "summed"
        is_plain = is_mean or same_loss(weight, 1.0)
        times = "" if is_plain else f"{text_of(weight, '.4g')} times "
        if abs(together - right) <= size:
            together = right
        number, of_all = _apart(together, right)
        of_big_batch = f"the big batch's {of_all}"
        headline, sentence = f"{times}the {unit} {what} loss is {number}, {of_big_batch}", ""
    is_wrong = bool(other) and not abs(together - right) <= size
    note = f"{text_of(one.piece.loss or 0.0, '.5g')} on rank {one.piece.rank}"
    return Judged(headline, sentence, note, is_wrong, of_all=True)


def _make_up(losses: Sequence[float], right: float) -> bool:
    """True if the mean of the ranks' losses, or their sum, is the big batch's loss."""
    return any(same_loss(one, right) for one in (sum(losses), sum(losses) / len(losses)))


def compared_with_rows(pieces: Pieces) -> list[Compared] | None:
    """Every piece beside its rows alone; None if the rows of one are not known."""
    found = []
    for piece in pieces.all:
        alone = pieces.alone(piece)
        if alone is None:
            return None
        factor = pieces.factor_between(piece.gradient, alone.gradient)
        once = tuple(sorted({*(piece.rows or ())}))
        if factor is None and len(once) < len(piece.rows or ()):
            each = pieces.alone(replace(piece, rows=once))
            if each is not None:  # it may have read some for two terms of its loss
                factor = pieces.factor_between(piece.gradient, each.gradient)
            if each is not None and factor is not None:
                piece, alone = replace(piece, rows=once), each
        if factor is None and not piece.gradient.any() and not alone.gradient.any():
            factor = 1.0
        drawn = pieces.alone(piece, drawn_again=True) if factor is None else None
        if drawn is not None and pieces.view.setting.draws_on_cpu:
            alone, factor = drawn, pieces.factor_between(piece.gradient, drawn.gradient)
        found.append(Compared(piece, factor, alone.gradient, alone.loss))
    return found


def fault_of_own_gradient(
    pieces: Pieces, compared: Sequence[Compared], wrong: Sequence[Compared]
) -> Whereabouts:
    """Whose gradients are wrong: those of the pieces in ``wrong`` are no multiples of their rows'.

    ``compared``: all pieces.
    """
    one, view = wrong[0], pieces.view
    ranks = tuple(sorted({other.piece.rank for other in wrong}))
    who = ranked(ranks, view.world_size)
    verb = "computes" if len(ranks) in (1, view.world_size) else "compute"
    judged = _judged(pieces, compared, one)
    whole = f"{who[:1].upper()}{who[1:]} {verb} another gradient than its rows give."
    some = _which_piece(pieces, wrong)
    is_told = judged.of_all or (len(ranks) == view.world_size and not some)
    whole = "" if is_told else f"{whole}{some}"
    names = _names(pieces, one)
    # What a rank has may be a part by design: what differs in the end tells more.
    differing = tuple(name for name in names if name in view.measured.differing)
    names = differing[::-1] if judged.of_all else differing or names
    about = who if len(ranks) in (1, view.world_size) else f"{len(ranks)} ranks"
    headline, sentence, lines = _from_where(pieces, wrong, names, judged, about)
    only_there = lines_only_on(view.observed.by_rank, ranks)
    changed = changes_before(view.observed.by_rank[one.piece.rank], one.piece.call)
    call, of_backward = one.piece.call, ""
    if judged.is_wrong and call is not None and call.made_at is None:
        of_backward = f"backward begins here: {judged.note}"
    note = f"the loss: {judged.note}" if judged.is_wrong else "the loss"
    of_loss = lines_of_the_loss(call, note, False, of_backward)
    shown = [*only_there, *changed, *lines]
    marked = [line for line in shown if line and line.is_fault]
    is_of_rows = not judged.of_all and judged.is_wrong and not _not_called(pieces, wrong, names)
    return Whereabouts(
        kind="own gradient",
        shows_later=not marked,
        headline=headline,
        sentence=f"{'' if is_of_rows else judged.sentence}{sentence}{whole}".rstrip(),
        what="loss of rows" if is_of_rows else "something else",
        lines=distinct(shown or of_loss),
        parameters=names,
        ranks=ranks,
    )


def _from_where(
    pieces: Pieces, wrong: Sequence[Compared], names: Sequence[str], judged: Judged, about: str
) -> tuple[str, str, list[PointedLine | None]]:
    """A headline, a sentence and lines on how the first of the pieces is wrong.

    ``about``: the ranks whose pieces are wrong, as the headline names them.
    """
    one = wrong[0]
    missing = _not_called(pieces, wrong, names)
    if missing:
        text = f"The module {missing} is not called, although the loss of the rows depends on it. "
        return f"{about}: {missing} is not called", text, []
    if judged.is_wrong:
        return judged.headline, "", []
    lines = backward_lines(pieces, one.piece)
    ran = own_backwards(pieces.view.observed.by_rank[one.piece.rank], one.piece.call)
    if ran and ran[0].withheld:
        what = f"Line {ran[0].line.number} {_what_it_returns(ran[0])}. "
        return f"{about}: a backward method returns no gradient", what, lines
    others = set(pieces.view.parameters.names) - set(names)
    is_all = set(names) == pieces.view.measured.differing
    rest = "; all others are right" if others and is_all else ""
    text = f"The loss is right, and the gradient of {names_text(names)} is not{rest}. "
    headline = "backward gives another gradient" if lines else "another gradient than its rows give"
    return f"{about}: {headline}", text, lines


def _not_called(pieces: Pieces, wrong: Sequence[Compared], names: Sequence[str]) -> str:
    """The module of a parameter without a gradient that none of these ranks has ever called; "" if
    there is none, or if not all calls were recorded.
    """
    traces = [pieces.view.observed.by_rank[one.piece.rank].trace for one in wrong]
    called = {call.name for trace in traces for call in trace.module_calls}
    for name in names if called and all(trace.complete for trace in traces) else ():
        module = name.rpartition(".")[0]
        place = pieces.view.parameters.places[name]
        if module not in called and not bool(wrong[0].piece.gradient[place].any()):
            return module
    return ""


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
    return tuple(reversed(best))


def _which_piece(pieces: Pieces, wrong: Sequence[Compared]) -> str:
    """Which backward passes, if not all of a rank."""
    counts = {len(of_rank) for of_rank in pieces.by_rank}
    numbers = sorted({one.piece.number for one in wrong})
    if counts == {1} or len(numbers) == max(counts):
        return ""
    shown = ", ".join(str(number + 1) for number in numbers)
    return f" That is so in backward pass {shown} of {max(counts)}."


# What a forward pass reads beside its rows: weights, buffers, and attributes of modules.


def changes_before(seen: Observation, backward: Call | None) -> list[PointedLine]:
    """The lines that changed what a forward pass reads before this backward pass. A line in a
    function that leaves backward to its caller stands for the caller's line.
    """
    if backward is None:
        return []
    lines, of_weights = dict[object, PointedLine](), dict[object, PointedLine]()
    forwards = {line_of(call) for call in seen.calls if call.kind in (Kind.FORWARD, Kind.WRAP)}
    for call in seen.calls:
        line = line_of(call)
        if (call.step, call.backwards) > (backward.step, backward.backwards) or line is None:
            continue
        if call.kind is Kind.WEIGHTS and call.step == backward.step and not call.in_backward:
            if not call.what:  # they are those of the case again
                of_weights.clear()
                continue
            note = f"changes {names_text(call.names)} before backward"
            met = meeting_lines(call, backward)
            if met is not None and met[0] != line:
                line, note = met[0], f"line {line.number} {note}"
            of_weights[line] = PointedLine(line, note, is_fault=True)
        elif call.kind is Kind.BUFFERS and line not in forwards:
            note = f"changes {names_text(call.names)} before the forward pass"
            lines[line] = PointedLine(line, note)
        elif call.kind is Kind.MODULE_STATE:
            note = f"sets {call.what} on {call.names[0] or 'the model'}"
            lines[line] = PointedLine(line, note)
    return [*lines.values(), *of_weights.values()][-MOST_CHANGES:]


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
    last = [one.pointed("a hook on the way back", True) for one in hooks[-1:]]
    seen = pieces.view.observed.by_rank[piece.rank]
    return [*lines_of_backwards(own_backwards(seen, piece.call)), *last]


def own_backwards(seen: Observation, backward: Call | None) -> list[OwnBackward]:
    """The backward methods of the user's own that ran, those first that withheld a gradient."""
    own: dict[str, OwnBackward] = {}
    for one in sorted(seen.own_backwards, key=lambda one: not one.withheld):
        if backward and (one.step, one.backwards) == (backward.step, backward.backwards + 1):
            own.setdefault(one.name, one)
    return list(own.values())


def lines_of_backwards(methods: Sequence[OwnBackward]) -> list[PointedLine]:
    """The lines of backward methods that return the gradient. Of several, one that returns none is
    marked: which of the others is wrong is not known.
    """
    return [
        PointedLine(one.line, _what_it_returns(one), bool(one.withheld) or len(methods) == 1)
        for one in methods
    ]


def _what_it_returns(own: OwnBackward) -> str:
    if own.withheld:
        return f"returns no gradient for input {own.withheld[0]} of {own.name}, which needs one"
    return f"the gradient that {own.name} gives back"


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
    if any(call.kind is Kind.OPTIMIZER_STEP for call in seen.calls):
        return not_seen("the optimizer has stepped, and gradients may have been cleared since")
    is_same = all(of_rank == gone for of_rank in missing.values())
    whose = "No rank has a" if is_same else f"Rank {ranks[0]} has no"
    backwards = [call for call in seen.calls if call.kind is Kind.BACKWARD]
    text, lines = _why_missing(observed, ranks[0], gone, backwards)
    is_seen = bool(lines)
    if not lines:
        lines += changes_before(seen, backwards[-1] if backwards else None)
    if view is not None and not lines:
        reduced = [one for one in view.observed.calls.reductions if ranks[0] in one.by_rank]
        lines = [one for place in reduced[-1:] for one in lines_that_left_out(view, place)]
    several = f"{len(gone)} gradients are" if len(gone) > 1 else f"the gradient of {gone[0]} is"
    only_there = lines_only_on(observed, ranks)
    return Whereabouts(
        "own gradient",
        f"{several} missing" if is_same else f"rank {ranks[0]}: {several} missing",
        f"{text} {whose} gradient of {names_text(gone)}.",
        distinct([*lines, *only_there]),
        tuple(gone),
        ranks,
        shows_later=not is_seen and not only_there,
        what="gradients missing",
    )


def fault_of_zeros(view: View) -> Whereabouts | None:
    """Why gradients that every rank holds as zeros were never computed; None if they were, or if
    other gradients differ as well.
    """
    names = sorted(view.measured.differing)
    if not names or bool(view.measured.by_rank[:, view.parameters.positions_of(names)].any()):
        return None
    found = where_gradients_are_missing(view.observed.by_rank, names, view)
    is_seen = found is not None and any(one.is_fault for one in found.lines)
    return replace(found, explains_all=True) if found is not None and is_seen else None


def _why_missing(
    observed: Mapping[int, Observation], rank: int, gone: Sequence[str], backwards: Sequence[Call]
) -> tuple[str, list[PointedLine | None]]:
    """The reason on record why these parameters have no gradients, and its lines."""
    seen = observed[rank]
    if not backwards:
        return f"No backward pass ran on rank {rank}.", []
    last: dict[str, Call] = {}
    for call in seen.calls:
        if call.kind is Kind.REQUIRES_GRAD:
            last |= dict.fromkeys(call.names, call)
    frozen = {n: last[n] for n in gone if n in last and not last[n].value}
    if frozen:
        what = f"sets requires_grad of {names_text(list(frozen))} to False"
        places = dict.fromkeys(line_of(call) for call in frozen.values())
        return f"A line {what}.", [at(place, what, True) for place in places]
    module = gone[0].rpartition(".")[0]
    calls = [one for one in seen.trace.module_calls if one.name == module]
    if calls and not any(one.with_gradients for one in calls):
        without = [one for one in seen.trace.module_calls if not one.with_gradients]
        around = [one for one in without if f"{module}.".startswith(f"{one.name}.")] or calls
        outermost = min(around, key=lambda one: len(one.name))
        text = f"{_module(module)} is called only where gradients are turned off."
        return f"{text[:1].upper()}{text[1:]}", [
            at(outermost.line, f"calls {_module(outermost.name)} without gradients", True),
            at(calls[-1].line, f"calls {_module(module)} without gradients"),
        ]
    own = lines_of_backwards([o for o in own_backwards(seen, backwards[-1]) if o.withheld])
    if own:
        return f"Line {own[0].line.number} {own[0].note}.", [*own]
    if not calls and any(one.name != module for one in seen.trace.module_calls):
        every = (call.name for one in observed.values() for call in one.trace.module_calls)
        where = f"rank {rank}" if module in every else "any rank"
        return f"The module {module or 'itself'} is not called on {where}.", []
    return f"Backward passes ran on rank {rank}, and none left these gradients.", []


def _module(name: str) -> str:
    return f"the module {name}" if name else "the model"


def _missing(seen: Observation, names: Sequence[str]) -> list[str]:
    """The parameters that had no gradient when the second run ended, in their order."""
    last: dict[str, bytes] = {}
    for state in seen.trace.states:
        last |= state.values
    if not seen.trace.complete:
        return []
    return [name for name in names if not last.get(name, b"")]
