"""The loss is wrong by a factor or a term, or is divided otherwise than the big batch's."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor

from ddp_equivalence.case.batch import take
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.examples_read import (
    example_numbers,
    read_by_several_ranks,
    rows_read_unequally,
)
from ddp_equivalence.diagnosis.lines import of_data
from ddp_equivalence.diagnosis.lines.of_data import lines_that_share
from ddp_equivalence.diagnosis.lines.of_loss import line_that_scales_loss
from ddp_equivalence.diagnosis.lines.of_reduction import lines_of_divisor
from ddp_equivalence.diagnosis.lines.origins import Link, divisors, last_setter_of_divisor
from ddp_equivalence.diagnosis.lines.source_tree import place_of, run_lines
from ddp_equivalence.diagnosis.lines.words import scaling_text
from ddp_equivalence.diagnosis.residual import unexplained
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine, all_divisors
from ddp_equivalence.diagnosis.whereabouts.forward_faults import fault_of_frequencies
from ddp_equivalence.diagnosis.whereabouts.gradient_mix import SAME_WEIGHT, lines_only_on, odd_ranks
from ddp_equivalence.diagnosis.whereabouts.gradient_path import (
    Path,
    Station,
    at,
    done_text,
    line_of,
    pointed,
)
from ddp_equivalence.diagnosis.whereabouts.own_gradient import SAME_LOSS, Compared
from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces
from ddp_equivalence.diagnosis.whereabouts.whereabouts import (
    Whereabouts,
    distinct,
    named,
    of_all,
    ranked,
)
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind, Operation, Operations

# The numbers by which a loss was multiplied or divided, and the operations that made them.

DIVIDING = ("div", "div_")
SCALING = (*DIVIDING, "mul", "mul_")

MOST_LOOKED_AT = 400
"""So many operations behind the loss are looked at, the nearest first."""

WHOLE = 1e-6
"""A number that is no further from a whole one is a whole one."""

MOST_NUMBERS = 16
"""Longer tensors are not looked through for a number that Python has read."""


@dataclass(frozen=True)
class Scaling:
    """``line`` multiplied or divided what became the loss by ``number``. ``made_at``: the lines
    that made the number of others, the last ones first; () if no operation of torch did.
    """

    line: CodeLine
    divides: bool
    number: float
    made_at: tuple[CodeLine, ...]

    def explains(self, factor: float) -> bool:
        """True if both this number and the right one are counts, where the loss is so many times
        what it should be.
        """
        right = self.number * factor if self.divides else self.number / factor
        return _is_count(self.number) and _is_count(right)


def scalings_of_loss(run: Operations) -> list[Scaling]:
    """By which numbers the loss of the first backward pass was scaled, the last ones first."""
    loss = next(_losses_of(run), None)
    found: list[Scaling] = []
    open_ones, seen = deque([] if loss is None else [loss]), set[int]()
    while open_ones and len(seen) < MOST_LOOKED_AT:
        number = open_ones.popleft()
        operation = run.operations[number]
        if number in seen or not operation.differentiable:
            continue
        seen.add(number)
        if operation.name in SCALING and operation.line is not None:
            found += _scalings(run, number, operation, operation.line)
        open_ones.extend(sorted(operation.after, reverse=True))
    return found


def loss_on_one_rank(run: Operations) -> float | None:
    """The sum of the losses at which all backward passes began; None if one is not known."""
    total = 0.0
    for loss in _losses_of(run):
        returned = run.operations[loss].returned if loss is not None else ()
        value = returned[0] if returned else None
        if value is None or run.values[value].tensor.numel() != 1:
            return None
        total += float(run.values[value].tensor)
    return total


def _losses_of(run: Operations) -> Iterator[int | None]:
    """The operations that made the losses at which backward passes began."""
    for number, operation in enumerate(run.operations):
        if operation.in_backward and number and not run.operations[number - 1].in_backward:
            before = run.operations[number - 1]
            if before.name == "ones_like":
                yield before.writers[0]
            else:
                yield number - 1 if before.differentiable else None


def _scalings(
    run: Operations, number: int, operation: Operation, line: CodeLine
) -> Iterator[Scaling]:
    divides = operation.name in DIVIDING
    for by in operation.numbers[:1]:
        read = _read_as(run, by, number)
        yield Scaling(line, divides, by, _lines_behind(run, read, by))
    for value, writer in list(zip(operation.given, operation.writers, strict=True))[1:]:
        if value is None or (writer is not None and run.operations[writer].differentiable):
            continue
        elements = run.values[value].tensor
        if elements.numel() == 1:
            yield Scaling(
                line, divides, float(elements), _lines_behind(run, writer, float(elements))
            )


def _read_as(run: Operations, number: float, before: int) -> int | None:
    """The last operation before that left just this number, which Python may have read."""
    if abs(number) in (0.0, 1.0):
        return None
    for place in range(before - 1, -1, -1):
        for value in run.operations[place].returned:
            if value is None or prod(run.values[value].shape) > MOST_NUMBERS:
                continue
            if bool((run.values[value].tensor == number).any()):
                return place
    return None


def _lines_behind(run: Operations, writer: int | None, number: float) -> tuple[CodeLine, ...]:
    """The lines whose operations returned this number, and were not given it."""
    found: dict[CodeLine, int] = {}
    open_ones, seen = [] if writer is None else [writer], set[int]()
    while open_ones and len(seen) < MOST_LOOKED_AT:
        place = open_ones.pop()
        operation = run.operations[place]
        if place in seen or not _has(run, operation.returned, number):
            continue
        seen.add(place)
        pairs = zip(operation.given, operation.writers, strict=True)
        given = [value for value, writer in pairs if writer is not None]
        if operation.line is not None and not _has(run, given, number):
            found[operation.line] = max(place, found.get(operation.line, place))
        open_ones.extend(operation.after)
    return tuple(sorted(found, key=lambda line: found[line], reverse=True))


def _has(run: Operations, values: Sequence[int | None], number: float) -> bool:
    """True if this number is an element of one of these values."""
    known = [run.values[one] for one in values if one is not None]
    small = [one.tensor for one in known if prod(one.shape) <= MOST_NUMBERS]
    return any(bool((one == number).any()) for one in small)


def _is_count(number: float) -> bool:
    return number > 0 and abs(number - round(number)) <= WHOLE * number


def is_left_by_backward(run: Operations) -> bool:
    """True if all gradients that the step leaves are what an operation of backward returned."""
    made = {one for op in run.operations if op.in_backward for one in op.returned}
    return made.issuperset(run.left.values())


# The lines of a loss that is a multiple of that of its rows, with the same multiple everywhere.


def lines_of_loss_factor(
    pieces: Pieces, compared: Sequence[Compared], factor: float
) -> list[PointedLine | None]:
    """The line that multiplies the loss by this number, the number's own line, and backward.

    Where backward begins at the loss of the rows, the line of the loss is not to blame.
    """
    call = compared[0].piece.call
    if call is None:
        return []
    begins = at(line_of(call), "backward begins")
    known = [one.loss_factor for one in compared if one.loss_factor is not None]
    if len(known) != len(compared) or any(abs(one / factor - 1) > SAME_LOSS for one in known):
        is_right = bool(known) and all(abs(one - 1) <= SAME_LOSS for one in known)
        note = "the loss of the rows" if is_right else "the loss"
        return [at(call.made_at, note, not is_right), at(line_of(call), "backward begins", True)]
    made = at(call.made_at, f"the loss is {text_of(factor, '.4g')} times that of its rows", True)
    scales = line_that_scales_loss(pieces.view, factor) or made
    if scales is None:
        return [begins]
    number = lines_of_divisor(pieces.view, compared[0].piece.rank, scales.line)
    return [scales, *number[:1], begins]


# All ranks count equally, but the backward passes of each rank do not.

ROUNDING = 10.0
"""A weight that is so many times the tolerance of a fit, relative to the largest, is not zero."""

MOST_PASSES = 4


def least_weight(pieces: Pieces, most: float) -> float:
    """A piece with a smaller weight is not in a mixture whose largest weight is ``most``."""
    return min(ROUNDING * pieces.tolerance, SAME_WEIGHT) * most


def passes_count_unequally(pieces: Pieces, path: Path) -> Whereabouts | None:
    """Says how often each backward pass counts; None if they count alike, or ranks do not."""
    weights = _by_pass(pieces, path)
    if weights is None:
        return None
    most = max(map(abs, weights))
    if not most or max(weights) - min(weights) <= SAME_WEIGHT * most:
        return None
    largest = max(range(len(weights)), key=lambda number: abs(weights[number]))
    shown = [
        f"{number + 1} counts {text_of(weight / weights[largest], '.3g')} times"
        for number, weight in enumerate(weights)
        if abs(weight / weights[largest] - 1) > SAME_WEIGHT
    ]
    more = " and so on," if len(shown) > MOST_PASSES else ""
    text = f"Of {len(weights)} backward passes of a rank, number "
    text += ", number ".join(shown[:MOST_PASSES]) + more
    lines = [
        pointed(one, f"{done_text(one.call, pieces)}; pass {shown[0]}", True)
        for one in _changes_between(path)
    ]
    return Whereabouts(
        "reduction",
        "the backward passes do not count equally",
        f"{text} as often as number {largest + 1}.",
        distinct(lines),
        fix="change gradients once, after the last backward pass." if lines else "",
    )


def _by_pass(pieces: Pieces, path: Path) -> list[float] | None:
    """The weight of each backward pass; None if a pass counts differently on the ranks."""
    if path.held is None or path.held.of or not any(one.number for one in pieces.all):
        return None
    most = float(path.held.weights.abs().max())
    found: dict[int, list[float]] = {}
    for piece, weight in zip(pieces.all, path.held.weights.tolist(), strict=True):
        found.setdefault(piece.number, []).append(weight)
    if any(max(one) - min(one) > least_weight(pieces, most) for one in found.values()):
        return None
    return [sum(one) / len(one) for _, one in sorted(found.items())]


def _changes_between(path: Path) -> list[Station]:
    """The changes of gradients after the first backward pass and before the last one."""
    passes = [n for n, one in enumerate(path.stations) if one.call.kind is Kind.BACKWARD]
    if len(passes) < 2:
        return []
    between = path.stations[passes[0] + 1 : passes[-1]]
    return [one for one in between if one.call.kind is not Kind.BACKWARD]


# A backward pass adds to gradients that would be right without it, as one through another's loss.
#
# In adversarial training, for example, the generator's loss also reaches the weights of the
# critic.

FIX = "keep this backward pass from these parameters, or clear what it leaves there."


def fault_of_a_pass(pieces: Pieces, uniform: float) -> Whereabouts | None:
    """The pass of each rank that is one too many; None if leaving out one changes nothing.

    ``uniform``: every rank holds this many times what all ranks have computed together.
    """
    view, counts = pieces.view, {len(of_rank) for of_rank in pieces.by_rank}
    if len(counts) != 1 or min(counts) < 2:
        return None
    names = [name for name in view.parameters.names if name in view.measured.differing]
    if not names:
        return None
    elements = view.parameters.positions_of(names)
    total, right = pieces.own.sum(0)[elements], view.expected[elements]
    found = []
    for number in range(counts.pop()):
        passes = [of_rank[number] for of_rank in pieces.by_rank]
        added = torch.stack([one.gradient for one in passes]).sum(0)[elements]
        if _equal(uniform * (total - added), right, pieces.tolerance) and bool(added.any()):
            found.append(passes)
    if len(found) != 1:
        return None
    passes = found[0]
    gradients = of_all(names, view.parameters.names)
    return Whereabouts(
        kind="own gradient",
        headline="one backward pass too many reaches some parameters",
        sentence=f"Without what one of the backward passes adds, {gradients} would be right.",
        lines=distinct([_line(passes[0], names), *_others(pieces, passes[0])]),
        parameters=tuple(names),
        ranks=tuple(view.setting.reporting_ranks),
        fix=FIX,
        explains_all=True,
    )


def _line(piece: Piece, names: list[str]) -> PointedLine | None:
    line = None if piece.call is None else line_of(piece.call)
    note = f"adds to the gradients of {named(names)}, which are right without it"
    return None if line is None else PointedLine(line, note, is_fault=True)


def _others(pieces: Pieces, wrong: Piece) -> list[PointedLine | None]:
    """The other backward passes of the same rank."""
    lines = [
        line_of(one.call)
        for one in pieces.by_rank[wrong.rank]
        if one is not wrong and one.call is not None
    ]
    return [PointedLine(line, "another backward pass") for line in lines if line is not None]


def _equal(found: Tensor, right: Tensor, tolerance: float) -> bool:
    return bool(found.isfinite().all()) and float((found - right).norm()) <= tolerance * float(
        right.norm()
    )


# Some gradients are a multiple of the big batch's, and a line has multiplied just these.

SAME_FACTOR = 1e-5
"""Factors whose relative difference is smaller are equal."""

FEWEST = 4
"""A parameter with fewer elements may be any multiple by chance."""

MOST_GROUPS = 3


def fault_of_parameter_factors(pieces: Pieces, total: Tensor, uniform: float) -> Whereabouts | None:
    """Which gradients have another factor, and the line that multiplied them.

    ``total``: what all ranks computed together, of which every rank holds ``uniform`` times. None
    if a gradient is no multiple of the big batch's, or if no line was seen to multiply it.
    """
    groups = _groups(pieces, total, uniform)
    wrong = {factor: names for factor, names in groups.items() if abs(factor - 1) > SAME_FACTOR}
    if not wrong or len(groups) > MOST_GROUPS or len(groups) < 2:
        return None
    view = pieces.view
    places = [
        (place, call.change.factor, factor)
        for factor, names in wrong.items()
        for place in view.observed.calls.changes(partial(_scales, names))
        for call in place.calls[:1]
        if call.change is not None and call.change.factor is not None
    ]
    if not places:
        return None
    every = view.parameters.names
    shown = [f"{of_all(names, every)}: {factor:.4g}" for factor, names in wrong.items()]
    rest = [name for name in every if all(name not in names for names in wrong.values())]
    others = " All others are right." if rest else ""
    sentence = f"In multiples of the big batch's, every rank holds {'; '.join(shown)}.{others}"
    lines = [line for one in places for line in _lines_of_scaling(pieces, *one)]
    names = tuple(name for of_factor in wrong.values() for name in of_factor)
    return Whereabouts(
        "reduction",
        f"{of_all(names, every)}: a wrong number multiplies them",
        sentence,
        distinct(lines),
        names,
        tuple(range(view.world_size)),
    )


def _groups(pieces: Pieces, total: Tensor, uniform: float) -> dict[float, tuple[str, ...]]:
    """How many times what they should be gradients are -> their names; {} if one is no multiple."""
    found: dict[float, list[str]] = {}
    small: list[tuple[str, float]] = []
    for name, place in pieces.view.parameters.places.items():
        right, own = pieces.view.expected[place], total[place]
        if not bool(own.any()) and not bool(right.any()):
            continue
        weight = pieces.factor_between(right, own)
        if weight is None:
            return {}
        if len(own) < FEWEST:
            small.append((name, uniform / weight))
            continue
        known = next((one for one in found if _alike(one, uniform / weight)), uniform / weight)
        found.setdefault(known, []).append(name)
    for name, factor in small:
        alike = next((one for one in found if _alike(one, factor)), None)
        if alike is None:
            return {}
        found[alike].append(name)
    return {factor: tuple(names) for factor, names in found.items()}


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= SAME_FACTOR * abs(other)


def _scales(names: tuple[str, ...], call: Call) -> bool:
    """True if a line multiplied some of these gradients, and no others, by a number."""
    change = call.change
    if change is None or change.factor is None or abs(change.factor - 1) <= SAME_FACTOR:
        return False
    return set(change.names) <= set(names)


def _lines_of_scaling(
    pieces: Pieces, place: CallSite, factor: float, times: float
) -> list[PointedLine]:
    """The line that multiplies, what would be right there, and what set its number."""
    rank = place.ranks[0]
    right = factor / times
    number = f"{1 / right:.4g}" if 0 < abs(factor) < 1 else f"{right:.4g}"
    shown = 1 / float(f"{1 / factor:.5g}")  # it was recorded with few digits
    what = named(place.first.change.names[:1]) if place.first.change is not None else "gradients"
    note = f"{scaling_text(what, shown)}; with {number} it would be right"
    run = run_lines(pieces.view, rank)
    setters = []
    known: list[Link | None] = [*divisors(run, place.line)[:1]]
    for link in known or [last_setter_of_divisor(run, place.line)]:
        if link is None or link.line == place.line:
            continue
        at = place_of(link.line.file, link.line.number)
        begun = run.exact_count(at, at.statement) if at is not None else None
        often = f" {begun} times" if begun and begun > 1 else ""
        name = link.name or "the number"
        note_of_setter = f"sets {name}{often}, by which line {place.line.number} divides"
        setters.append(PointedLine(link.line, note_of_setter, True))
    return [*setters, replace(place.pointed(note), is_fault=True)]


# One term of the loss has a wrong weight: the parameters that only it reaches show that.

EQUAL = 1e-6


MOST_TERM_LINES = 2


def fault_of_a_term(pieces: Pieces, uniform: float) -> Whereabouts | None:
    """Says which lines compute a term of the loss that counts a wrong number of times.

    ``uniform``: every rank holds this many times what all ranks computed together. None unless some
    parameters hold a common multiple of the big batch's gradient, others hold this gradient itself,
    and a scalar of the step reaches only the former.
    """
    view = pieces.view
    total = uniform * pieces.own.sum(0)
    factors: dict[str, float | None] = {}
    for name, place in view.parameters.places.items():
        factors[name] = pieces.factor_between(total[place], view.expected[place])
    tolerance = max(EQUAL, pieces.tolerance)
    right = {name for name, one in factors.items() if one and abs(one - 1) <= tolerance}
    wrong = {name: one for name, one in factors.items() if one is not None and name not in right}
    values = list(wrong.values())
    if view.parameters.total_of(wrong) < FEWEST:
        return None
    if not right or not values or max(values) - min(values) > tolerance * max(map(abs, values)):
        return None
    calls = [call for call in view.observed.calls.of(0) if call.kind is Kind.LOSS and call.names]
    terms = [call for call in calls if wrong.keys() & call.names and not right & set(call.names)]
    if not terms:
        return None
    joined = [call for call in calls if wrong.keys() & call.names and right & set(call.names)]
    often = text_of(values[0], ".4g")
    text = f"The gradients of {named(list(wrong))} are {often} times the big batch's, and those of "
    text += f"{named(sorted(right))} are right. So a term of the loss that reaches only the former "
    text += f"counts {often} times."
    note = f"a term of the loss that reaches {named(list(wrong)[:1])} counts {often} times"
    return Whereabouts(
        kind="own gradient",
        headline=f"a term of the loss counts {often} times",
        sentence=text,
        lines=distinct(
            [
                *_lines_of_term(terms, note)[-MOST_TERM_LINES:],
                *_lines_of_term(joined, "joins it with the rest of the loss", is_fault=False)[:1],
            ]
        ),
        parameters=tuple(wrong),
        ranks=tuple(range(view.world_size)),
    )


def _lines_of_term(calls: list[Call], note: str, is_fault: bool = True) -> list[PointedLine]:
    """Each line once, in the order of their last run; only the last one is the fault."""
    found = list({call.line: None for call in reversed(calls) if call.line is not None})[::-1]
    return [
        PointedLine(line, note, is_fault)
        if number + 1 == len(found)
        else PointedLine(line, "an earlier part of this term")
        for number, line in enumerate(found)
        if line is not None
    ]


# The ranks' gradients and their reduction are right: the big batch divides otherwise.

SAME = 1e-3
MOST_COUNTS = 8


def right_weights(
    pieces: Pieces, compared: Sequence[Compared]
) -> tuple[str, tuple[float, ...], float] | None:
    """What the big batch divides by: the unit, how much of it each piece has, and how much there
    is. None if no count of the batch makes it a weighted mean of the pieces.
    """
    setting = pieces.view.setting
    counts: dict[str, list[float]] = {}
    for one in compared:
        rows = one.piece.rows or ()
        batch = take(setting.batch, rows, setting.case.batch_dims)
        divisors: Mapping[str, float] = all_divisors(batch, len(rows))
        for unit, count in divisors.items():
            counts.setdefault(unit, []).append(count)
    gradients = torch.stack([one.gradient_alone for one in compared])
    for unit, of_pieces in counts.items():
        total = sum(of_pieces)
        if len(of_pieces) != len(compared) or not total:
            continue
        weights = torch.tensor(of_pieces, dtype=torch.float64) / total
        if unexplained(pieces.view.expected, weights @ gradients) <= pieces.tolerance:
            return unit, tuple(of_pieces), total
    if unexplained(pieces.view.expected, gradients.sum(0)) <= pieces.tolerance:
        return "", (1.0,) * len(compared), 1.0
    return None


def fault_of_division(pieces: Pieces, compared: Sequence[Compared]) -> Whereabouts:
    """Each piece's gradient is ``factor`` times that of its rows, and they are averaged."""
    known = right_weights(pieces, compared)
    factors = torch.tensor([one.factor or 0.0 for one in compared], dtype=torch.float64)
    rows = torch.tensor([len(one.piece.rows or ()) for one in compared], dtype=torch.float64)
    weighed_by_rows = known is None and bool(rows.all()) and _all_alike(factors / rows)
    if not _all_alike(factors) and not weighed_by_rows:
        return _other_factors(pieces, compared, factors)
    if known is None:
        return fault_of_frequencies(pieces.view) or _no_mean(pieces, compared)
    return _other_divisor(pieces, compared, known)


def _all_alike(values: Tensor) -> bool:
    return float(values.max() - values.min()) <= SAME * float(values.abs().max())


def _other_factors(pieces: Pieces, compared: Sequence[Compared], factors: Tensor) -> Whereabouts:
    """The pieces' gradients are different multiples of what their rows give."""
    by_rank: dict[int, list[float]] = {}
    by_number: dict[int, list[float]] = {}
    for one, factor in zip(compared, factors.tolist(), strict=True):
        by_rank.setdefault(one.piece.rank, []).append(factor)
        by_number.setdefault(one.piece.number, []).append(factor)
    headline = "the losses have different factors"
    whole = "losses" if _begun_so(compared) else "gradients"
    if all(_all_alike(torch.tensor(one)) for one in by_rank.values()):
        each = {rank: values[0] for rank, values in by_rank.items()}
        odd = odd_ranks(each)
        shown = _listed("rank", each)
    elif all(_all_alike(torch.tensor(one)) for one in by_number.values()):
        each = {number + 1: values[0] for number, values in by_number.items()}
        odd, shown = (), _listed("backward pass", each)
    else:
        each = dict(enumerate(factors.tolist()))
        odd, shown = (), "each another one"
    ranks = odd or tuple(range(pieces.view.world_size))
    if odd:
        headline = f"{ranked(odd, pieces.view.world_size)}: the loss has another factor"
    first = next(one for one in compared if one.piece.rank == ranks[0])
    call = first.piece.call
    sentence = f"These are the {whole}, in multiples of what their rows give: {shown}."
    return Whereabouts(
        "own gradient",
        headline,
        sentence,
        distinct(
            [
                *_lines_of_rows(pieces, compared),
                *lines_only_on(pieces.view.observed.by_rank, odd),
                at(call.made_at if call else None, "the loss", True),
                at(line_of(call) if call else None, f"begins here: {shown}", True),
            ]
        ),
        pieces.view.parameters.names,
        ranks,
    )


def _begun_so(compared: Sequence[Compared]) -> bool:
    """True if the losses at which backward began show the same factors as the gradients."""
    return all(
        one.loss_factor is not None
        and one.factor is not None
        and abs(one.loss_factor - one.factor) <= SAME * abs(one.factor)
        for one in compared
    )


def _listed(what: str, values: Mapping[int, float]) -> str:
    shown = ", ".join(
        f"{what} {key} {text_of(one, '.4g')}" for key, one in list(values.items())[:MOST_COUNTS]
    )
    return shown + (", ..." if len(values) > MOST_COUNTS else "")


def _no_mean(pieces: Pieces, compared: Sequence[Compared]) -> Whereabouts:
    call = compared[0].piece.call
    pieces_text = "rank's rows" if len(compared) == pieces.view.world_size else "micro-batch"
    return Whereabouts(
        "big batch",
        "the big batch is no mean of the parts",
        f"{_why_no_mean(pieces, compared)} Each gradient is that of its {pieces_text}, and they "
        "are averaged rightly, but the gradient of the big batch is not this mean.",
        distinct(
            [
                *_lines_of_rows(pieces, compared),
                *_loss_lines(call, "the loss of the rank's own rows"),
            ]
        ),
        pieces.view.parameters.names,
        tuple(range(pieces.view.world_size)),
    )


def _lines_of_rows(pieces: Pieces, compared: Sequence[Compared]) -> list[PointedLine]:
    """The line that made ranks read rows more than once, or not at all."""
    view = pieces.view
    never, often = _unread_and_repeated(pieces, compared)
    found: list[PointedLine] = []
    if often:
        found = of_data.line_that_repeats(view, often)
    elif never:
        found = of_data.line_that_drops(view, never)
    if found or not (often or never):
        return found
    return of_data.lines_of_own_sampler(view) or lines_that_share(
        view, next(iter(read_by_several_ranks(view)), ())
    )


def _unread_and_repeated(
    pieces: Pieces, compared: Sequence[Compared]
) -> tuple[list[int], list[int]]:
    read = Counter(row for one in compared for row in one.piece.rows or ())
    never = [row for row in range(pieces.view.setting.example_count) if not read[row]]
    return never, [row for row, times in sorted(read.items()) if times > 1]


def _why_no_mean(pieces: Pieces, compared: Sequence[Compared]) -> str:
    view = pieces.view
    never, often = _unread_and_repeated(pieces, compared)
    if (never or often) and rows_read_unequally(view):
        return "The ranks do not divide the batch up."  # the report says how, above this
    if never or often:
        parts = [f"no rank read {example_numbers(never)}"] if never else []
        parts += [f"{example_numbers(often)} were read more than once"] if often else []
        text = ", and ".join(parts)
        return f"{text[:1].upper()}{text[1:]}."
    forward = compared[0].piece.forward
    whole = tuple(range(view.setting.example_count))
    if forward is not None and forward.generator:
        again = view.examples.compute(whole, forward.generator).gradient
        if unexplained(view.expected, again) > pieces.tolerance:
            return "The forward pass draws random numbers, and other ones for the big batch."
    if _is_mixture(pieces, torch.stack([one.gradient_alone for one in compared])):
        return "The big batch weights its parts, and no count of the batch gives these weights."
    return "The big batch is no mixture of its parts, as where loss or model look across rows."


def _is_mixture(pieces: Pieces, gradients: Tensor) -> bool:
    if gradients.shape[1] < gradients.shape[0] + 3:
        return False
    solved = torch.linalg.lstsq(gradients.T, pieces.view.expected, driver="gelsd").solution
    return unexplained(pieces.view.expected, solved @ gradients) <= pieces.tolerance


def _other_divisor(
    pieces: Pieces, compared: Sequence[Compared], known: tuple[str, tuple[float, ...], float]
) -> Whereabouts:
    unit, counts, total = known
    call = compared[0].piece.call
    what = "rank" if len(compared) == pieces.view.world_size else "micro-batch"
    if not unit:
        text = "the big batch is the sum of its parts, not their mean"
        note = "the loss of the rows is a sum"
    else:
        shown = ", ".join(f"{count:g}" for count in counts[:MOST_COUNTS])
        more = ", ..." if len(counts) > MOST_COUNTS else ""
        text = (
            f"the losses divide by {shown}{more} ({unit}), and the big batch by {total:g}, "
            "so the parts should not count equally"
        )
        note = f"divides by the {what}'s own count ({unit})"
        if max(counts) == min(counts):
            text = f"the parts count equally in the big batch ({unit}), but not in the result"
            note = "the loss of the rows"
    return Whereabouts(
        "big batch",
        "the big batch divides by another number",
        f"{text[:1].upper()}{text[1:]}. Each {what}'s gradient is that of its rows, and they are "
        "averaged.",
        distinct(_loss_lines(call, note)),
        pieces.view.parameters.names,
        tuple(range(pieces.view.world_size)),
        fix="" if not unit else "divide each summed loss by the count of the whole batch.",
    )


def _loss_lines(call: Call | None, note: str) -> list[PointedLine | None]:
    if call is None:
        return []
    return [at(call.made_at, note, True), at(line_of(call), "backward begins")]
