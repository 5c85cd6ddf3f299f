"""Each pass computed a multiple of what its rows give: the multiples differ, or the big batch's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.divisors import what_it_divides_by
from ddp_equivalence.diagnosis.lines.of_data import lines_that_share
from ddp_equivalence.diagnosis.means_of_parts import is_mean_of_blocks
from ddp_equivalence.diagnosis.residual import fitted_mixture, unexplained
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.where.gradient_path import (
    lines_of_the_loss,
    lines_only_on,
    odd_ranks,
)
from ddp_equivalence.diagnosis.where.own_gradient import Compared
from ddp_equivalence.diagnosis.where.pieces import Pieces, same_loss
from ddp_equivalence.diagnosis.where.whereabouts import (
    LOSS_OF_ROWS,
    Whereabouts,
    distinct,
    ranked,
)
from ddp_equivalence.measurement.calls import Call

SAME = 1e-3
MOST_COUNTS = 8


def fault_of_division(pieces: Pieces, compared: Sequence[Compared]) -> Whereabouts:
    """Each piece's gradient is ``factor`` times that of its rows, and their sum has one factor."""
    known = _right_weights(pieces, compared)
    factors = torch.tensor([one.factor or 0.0 for one in compared], dtype=torch.float64)
    rows = torch.tensor([len(one.piece.rows or ()) for one in compared], dtype=torch.float64)
    weighed_by_rows = known is None and bool(rows.all()) and _all_alike(factors / rows)
    if not _all_alike(factors) and not weighed_by_rows:
        return _other_factors(pieces, compared, factors)
    return _other_divisor(pieces, compared, known)


def _right_weights(
    pieces: Pieces, compared: Sequence[Compared]
) -> tuple[str, tuple[float, ...], float] | None:
    """The divisor of the big batch: its unit, how much of it each piece has, and how much there
    is. None if no count of the batch makes it a weighted mean of the pieces.
    """
    found = what_it_divides_by(pieces.view, [one.piece.rows or () for one in compared])
    if found is not None:
        return found.unit, found.counts, sum(found.counts)
    gradients = torch.stack([one.gradient_alone for one in compared])
    if unexplained(pieces.view.expected, gradients.sum(0)) <= pieces.tolerance:
        return "", (1.0,) * len(compared), 1.0
    return None


def _all_alike(values: Tensor) -> bool:
    return float(values.max() - values.min()) <= SAME * float(values.abs().max())


def _other_factors(pieces: Pieces, compared: Sequence[Compared], factors: Tensor) -> Whereabouts:
    """The pieces' gradients are different multiples of what their rows give."""
    world_size = pieces.view.world_size
    by_rank: dict[int, list[float]] = {}
    by_number: dict[int, list[float]] = {}
    for one, factor in zip(compared, factors.tolist(), strict=True):
        by_rank.setdefault(one.piece.rank, []).append(factor)
        by_number.setdefault(one.piece.number, []).append(factor)
    odd, wrong = tuple[int, ...](), tuple[int, ...]()
    if all(_all_alike(torch.tensor(one)) for one in by_rank.values()):
        wrong = _wrong_ranks(pieces, compared, factors)
        odd = wrong or odd_ranks({rank: values[0] for rank, values in by_rank.items()})
        shown = _listed("rank", {rank: values[0] for rank, values in by_rank.items()})
    elif all(_all_alike(torch.tensor(one)) for one in by_number.values()):
        shown = _listed("backward pass", {n + 1: values[0] for n, values in by_number.items()})
    else:
        shown = "each another one"
    ranks = odd or tuple(range(world_size))
    call = next(one for one in compared if one.piece.rank == ranks[0]).piece.call
    note = f"the loss, in multiples of what its rows give: {shown}"
    whole = "losses" if all(map(_begun_so, compared)) else "gradients"
    return Whereabouts(
        "own gradient",
        f"{ranked(odd, world_size)}: the loss has {'a wrong' if wrong else 'another'} factor"
        if odd
        else "the losses have different factors",
        f"These are the {whole}, in multiples of what their rows give: {shown}.",
        distinct(
            [
                *lines_only_on(pieces.view.observed.by_rank, odd),
                *lines_of_the_loss(call, note, True, f"backward begins here: {shown}"),
            ]
        ),
        pieces.view.parameters.names,
        ranks,
    )


def _wrong_ranks(pieces: Pieces, compared: Sequence[Compared], factors: Tensor) -> tuple[int, ...]:
    """The ranks whose factor is not the one with which what all ranks hold would be the big batch;
    () if that is not known, or true of all.
    """
    right, weight = pieces.view.expected, pieces.uniform_weight
    rows = torch.stack([one.gradient_alone for one in compared])
    weights = None if weight is None else fitted_mixture(rows, right[None]).weights
    if weights is None or unexplained(right, weights[0] @ rows) > pieces.tolerance:
        return ()
    off = (weights[0] / (weight or 1.0) - factors).abs() > SAME * factors.abs()
    wrong = {one.piece.rank for one, is_off in zip(compared, off.tolist(), strict=True) if is_off}
    return tuple(sorted(wrong)) if len(wrong) < pieces.view.world_size else ()


def _begun_so(one: Compared) -> bool:
    """True if the loss at which backward began shows the same factor as the gradient."""
    factor, begun = one.factor or 0.0, one.loss_factor
    return begun is not None and abs(begun - factor) <= SAME * abs(factor)


def _listed(what: str, values: Mapping[int, float]) -> str:
    shown = ", ".join(
        f"{what} {key} {text_of(one, '.4g')}" for key, one in list(values.items())[:MOST_COUNTS]
    )
    return shown + (", ..." if len(values) > MOST_COUNTS else "")


def _of_loss(backward: Call | None, note: str) -> list[PointedLine | None]:
    lines = lines_of_the_loss(backward, note, True)
    return [one and replace(one, of_rows=note == LOSS_OF_ROWS) for one in lines]


def _no_mean(
    pieces: Pieces, compared: Sequence[Compared], what: str
) -> tuple[str, str, list[PointedLine]]:
    """A headline, a clause, and the lines that deal the examples if that is wrong, where the big
    batch is not made of its parts by any known count.
    """
    view, together = pieces.view, pieces.loss_together
    counts = Counter(row for one in compared for row in one.piece.rows or ())
    if len({*counts.values()}) > 1 or len(counts) < view.setting.example_count:
        text = "the ranks read some examples more often than others, and the big batch reads each"
        return "examples do not count equally often", f"{text} once", lines_that_share(view)
    if is_mean_of_blocks(view):
        text = (
            "the loss joins neighbours in the batch: blocks of its order would give the big batch"
        )
        headline = "examples that belong together are not read together"
        return headline, f"{text}, and the ranks read other examples", lines_that_share(view)
    right = view.examples.big_batch_loss
    if together is not None and same_loss(together, right):
        text = "together the losses are that of the big batch, and the gradients are not its"
        why = f"something in backward depends on more than a {what}'s own examples"
        return "the losses agree, and the gradients do not", f"{text} gradient, so {why}", []
    parts = "ranks'" if what == "rank" else "micro-batches'"
    headline = f"the mean of the {parts} gradients is not the big batch's"
    text = "the gradient of an example depends on which others, or how many, are computed with it"
    return headline, text, []


def _fix(divisor: float) -> str:
    """``divisor``: what the sum of the ranks' gradients is divided by afterwards."""
    fix = "divide each summed loss by the count of the whole batch"
    undone = "" if abs(divisor - 1) <= SAME else f", and multiply it by {text_of(divisor, '.4g')}"
    return f"{fix}{undone}."


def _other_divisor(
    pieces: Pieces, compared: Sequence[Compared], known: tuple[str, tuple[float, ...], float] | None
) -> Whereabouts:
    """The ranks' gradients and their reduction are right: the big batch divides otherwise."""
    call = compared[0].piece.call
    what = "rank" if len(compared) == pieces.view.world_size else "micro-batch"
    unit, counts, total = known or ("", (), 1.0)
    factors = [one.factor or 0.0 for one in compared]
    shown_factors = ", ".join(text_of(one, ".4g") for one in factors[:MOST_COUNTS])
    times = "" if all(abs(one - 1) <= SAME for one in factors) else f", times {shown_factors}"
    headline, note = "the big batch divides by another number", LOSS_OF_ROWS
    of_rows: list[PointedLine] = []
    if known is None:
        headline, text, of_rows = _no_mean(pieces, compared, what)
    elif not unit:
        text = "the big batch is the sum of its parts, not their mean"
        note = "the loss of the rows is a sum"
    elif max(counts) == min(counts):
        text = f"the parts count equally in the big batch ({unit}), but not in the result"
    else:
        shown = ", ".join(f"{count:g}" for count in counts[:MOST_COUNTS])
        more = ", ..." if len(counts) > MOST_COUNTS else ""
        text = (
            f"the losses divide by {shown}{more} ({unit}), and the big batch by {total:g}, "
            "so the parts should not count equally"
        )
        note = f"divides by the {what}'s own count ({unit})"
    if times and known is not None:
        note = f"the loss: {shown_factors} times what its rows give"
    divisor = 1 / (pieces.uniform_weight or 1 / len(compared))
    reduced = "they are averaged"
    if abs(divisor - len(compared)) > SAME * divisor:
        reduced = f"their sum over {len(compared)} is divided by {text_of(divisor, '.4g')}"
    return Whereabouts(
        "big batch",
        headline,
        f"{text[:1].upper()}{text[1:]}. Each {what}'s gradient is that of its rows{times}, and "
        f"{reduced}.",
        distinct(of_rows or _of_loss(call, note)),
        pieces.view.parameters.names,
        tuple(range(pieces.view.world_size)),
        fix=_fix(divisor) if unit and not times else "",
        explains_all=bool(of_rows),
    )
