"""How often each example entered the measured gradient: 1.00 is as often as in the big batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_equivalence.diagnosis.share_fit import (
    NoShares,
    ShareFit,
    ShareRow,
    fit_shares,
    fitted_positions,
)
from ddp_equivalence.diagnosis.time_left import BY_EXAMPLE, BY_RANK, OutOfTime
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.strategies.sharded_batch import Indices

MAX_EXAMPLES = 1024
MAX_VALUES = 4_000_000
"""If there are more examples, or more examples x elements, the examples are not fitted one by one,
but only by micro-batch or by rank."""


@dataclass(frozen=True)
class Shares:
    """The shares of examples in what every rank holds; 1.00 is as often as in the big batch.

    ``pieces`` says what could be told apart: "examples", "micro-batches" or "ranks". ``by_rank``:
    reporting rank -> mean share of the examples of each rank. ``by_micro_batch``: reporting rank ->
    for each rank, the mean share of each of its micro-batches; None where there are none.
    ``by_example``: reporting rank -> share of each example; None where examples could not be told
    apart, and ``why_not_examples`` is then the reason.

    ``unexplained``: reporting rank -> what no mixture of the pieces explains, relative to what the
    rank holds. ``condition``: the condition number of the fit, which was made on ``elements``
    elements. ``only``: the parameters that the fit was made on; empty if it was made on all.
    """

    by_rank: Mapping[int, ShareRow]
    by_micro_batch: Mapping[int, tuple[ShareRow, ...]] | None
    by_example: Mapping[int, ShareRow] | None
    unexplained: Mapping[int, float]
    condition: float
    elements: int
    pieces: str
    only: tuple[str, ...] = ()
    why_not_examples: str = ""


def shares_of(view: View) -> Shares | NoShares:
    """The shares in what every rank holds, or the reason why they cannot be determined.

    The fit tells single examples apart if possible, else micro-batches, else only ranks.
    """
    if view.parts.by_rank is None:
        return NoShares("it is not known which examples each rank took")
    micro_batches = [part for parts in view.parts.by_rank for part in parts]
    shards = view.parts.examples_by_rank
    examples = sorted({index for shard in shards for index in shard})
    elements = len(fitted_positions(view))
    fit: ShareFit | NoShares
    if len(examples) > MAX_EXAMPLES or len(examples) * elements > MAX_VALUES:
        fit = NoShares(f"{len(examples)} examples are too many to fit one by one")
    else:
        with view.time.counted(BY_EXAMPLE):
            fit = _fit_in_time(view, [(index,) for index in examples], "examples", BY_EXAMPLE)
    if isinstance(fit, ShareFit):
        piece_of = {index: n for n, index in enumerate(examples)}
        return _shares(view, fit, "examples", piece_of, fit.by_rank)
    if fit.left_over:
        return fit
    why_not_examples = fit.reason
    coarser = [(micro_batches, "micro-batches")] if len(micro_batches) > len(shards) else []
    for pieces, name in (*coarser, (shards, "ranks")):
        fit = _fit_in_time(view, pieces, name, BY_RANK)
        if isinstance(fit, ShareFit):
            piece_of = {index: n for n, piece in enumerate(pieces) for index in piece}
            return _shares(view, fit, name, piece_of, None, why_not_examples)
    return fit


def _fit_in_time(
    view: View, pieces: Sequence[Indices], name: str, part: str
) -> ShareFit | NoShares:
    """The fit, unless there is no time for it. ``part``: its name if it is left out."""
    try:
        view.time.require()
        return fit_shares(view, pieces, name)
    except OutOfTime:
        view.time.leave_out(part)
        return NoShares(f"the deadline of {view.time.deadline:g} s left no time for it")


def _shares(
    view: View,
    fit: ShareFit,
    pieces: str,
    piece_of: Mapping[int, int],
    by_example: Mapping[int, ShareRow] | None,
    why_not_examples: str = "",
) -> Shares:
    """``piece_of``: example -> the piece of the fit that it belongs to."""

    def means(row: ShareRow, groups: Sequence[Indices]) -> ShareRow:
        return tuple(_mean([row[piece_of[index]] for index in group]) for group in groups)

    shards, parts_by_rank = view.parts.examples_by_rank, view.parts.by_rank or ()
    by_micro_batch = None
    if pieces != "ranks" and any(len(parts) > 1 for parts in parts_by_rank):
        by_micro_batch = {
            rank: tuple(means(row, parts) for parts in parts_by_rank)
            for rank, row in fit.by_rank.items()
        }
    differing = view.measured.differing if view.measured.only_some_parameters_differ else ()
    return Shares(
        by_rank={rank: means(row, shards) for rank, row in fit.by_rank.items()},
        by_micro_batch=by_micro_batch,
        by_example=by_example,
        unexplained=fit.unexplained,
        condition=fit.condition,
        elements=len(fitted_positions(view)),
        pieces=pieces,
        only=tuple(name for name in view.parameters.names if name in differing),
        why_not_examples=why_not_examples,
    )


def _mean(shares: list[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None
