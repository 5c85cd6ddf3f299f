"""The big batch divides by another number than the losses of the ranks do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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
from ddp_equivalence.diagnosis.lines.of_loss import line_that_scales_loss
from ddp_equivalence.diagnosis.lines.of_reduction import lines_of_divisor
from ddp_equivalence.diagnosis.residual import unexplained
from ddp_equivalence.diagnosis.setting import PointedLine, all_divisors
from ddp_equivalence.diagnosis.whereabouts.gradient_path import (
    at,
    line_of,
    lines_only_on,
    odd_ranks,
)
from ddp_equivalence.diagnosis.whereabouts.own_gradient import SAME_LOSS, Compared
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, ranked
from ddp_equivalence.measurement.calls import Call

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
        return _no_mean(pieces, compared)
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
        "the mean of right parts is not the big batch",
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
    return of_data.lines_of_own_sampler(view) or of_data.lines_that_share(
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
