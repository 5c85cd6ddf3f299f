"""How often each example entered the measured gradient: 1.00 is as often as in the big batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.comparison.gradients import ElementSample
from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.diagnosis.example_gradients import MUCH_ROUNDING
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE, WORST_CONDITION, fitted_mixture
from ddp_equivalence.diagnosis.time_left import BY_EXAMPLE, BY_RANK
from ddp_equivalence.diagnosis.view import HALF_PRECISION, View
from ddp_equivalence.strategies.sharded_batch import Indices

NOISE = 10.0
"""Shares of a group differ if they do so by this many times what the fit leaves unexplained, which
its condition number may magnify.
"""

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
    rank holds. ``rounding``: so much of it may be rounding. ``condition``: the condition number of
    the fit, which was made on ``elements`` elements. ``only``: the parameters that the fit was made
    on; empty if it was made on all. ``ranges``: reporting rank -> the smallest and the largest
    share among the examples of each rank, of which ``by_rank`` has the mean.
    """

    by_rank: Mapping[int, ShareRow]
    by_micro_batch: Mapping[int, tuple[ShareRow, ...]] | None
    by_example: Mapping[int, ShareRow] | None
    unexplained: Mapping[int, float]
    condition: float
    elements: int
    pieces: str
    rounding: float
    only: tuple[str, ...] = ()
    why_not_examples: str = ""
    ranges: Mapping[int, tuple[tuple[float, float] | None, ...]] = field(default_factory=dict)


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

    def by_pieces(fit: ShareFit, pieces: Sequence[Indices], name: str, why_not: str) -> Shares:
        piece_of = {index: n for n, piece in enumerate(pieces) for index in piece}
        return _shares(view, fit, name, piece_of, None, why_not)

    fit: ShareFit | NoShares
    if not view.parameters.sample.is_whole:  # the gradient of each piece takes long
        fit = _fit_in_time(view, shards, "ranks", BY_RANK)
        if isinstance(fit, ShareFit):
            return by_pieces(fit, shards, "ranks", "the model is large, and ranks explain it")
    if len(examples) > MAX_EXAMPLES or len(examples) * elements > MAX_VALUES:
        fit = NoShares(f"{len(examples)} examples are too many to fit one by one")
    else:
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
            return by_pieces(fit, pieces, name, why_not_examples)
    return fit


def _fit_in_time(
    view: View, pieces: Sequence[Indices], name: str, part: str
) -> ShareFit | NoShares:
    """The fit, unless there is no time for it. ``part``: its name if it is left out."""
    no_time = NoShares(f"the deadline of {view.time.deadline:g} s left no time for it")
    return view.time.within(part, lambda: fit_shares(view, pieces, name), no_time)


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

    def ends(row: ShareRow, group: Indices) -> tuple[float, float] | None:
        known = [share for index in group if (share := row[piece_of[index]]) is not None]
        noise = NOISE * fit.condition * max(fit.unexplained.values())
        return (min(known), max(known)) if known and max(known) - min(known) > noise else None

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
        rounding=_rounding(view),
        only=tuple(name for name in view.parameters.names if name in differing),
        why_not_examples=why_not_examples,
        ranges={rank: tuple(ends(row, one) for one in shards) for rank, row in fit.by_rank.items()},
    )


def _rounding(view: View) -> float:
    reduced = (HALF_PRECISION[name] for names in view.observed.reduced_in_half for name in names)
    eps = max([view.eps, *(torch.finfo(dtype).eps for dtype in reduced)])
    return max(NEGLIGIBLE, MUCH_ROUNDING * eps)


def _mean(shares: list[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


# A least-squares fit: the measured gradient as a mixture of the gradients of single pieces.
#
# A piece is an example, a micro-batch or the shard of a rank. With g_i the gradient of piece i
# alone, solve measured = sum_i s_i g_i, and the same for the big batch. The ratio of the two
# solutions is the share of the piece.

MOST_LEFT = 0.3
"""If a fit leaves more of what a rank holds, its shares are noise."""

SPARE_PART = 8
"""There must be an eighth more elements than pieces, or any gradient would be a mixture of them."""

NO_SHARE = 1e-9
"""A piece does not count in the big batch if its coefficient there is smaller than this, relative
to the largest coefficient."""

SMALLEST_NORM = 1e-300
"""The divisor that replaces a norm that is zero."""

ShareRow = tuple[float | None, ...]
"""The share of each piece in what one rank holds; None for a piece without a gradient."""


@dataclass(frozen=True)
class ShareFit:
    """The shares of all pieces.

    ``by_rank``: rank -> the share of each piece in the gradient that the rank holds.
    ``unexplained``: rank -> the part of this gradient that no mixture of the pieces explains.
    ``condition``: the condition number of the fit.
    """

    by_rank: Mapping[int, ShareRow]
    unexplained: Mapping[int, float]
    condition: float


@dataclass(frozen=True)
class NoShares:
    """The shares cannot be determined; ``reason`` says why, in words.

    ``left_over``: the part of what a rank holds that no mixture of the pieces, and so of larger
    pieces, explains; 0 if that is not why.
    """

    reason: str
    left_over: float = 0.0


def fit_shares(view: View, pieces: Sequence[Indices], name: str) -> ShareFit | NoShares:
    """The share of each of these pieces, or the reason why the shares cannot be determined.

    Raises OutOfTime.
    ``name``: what the reason calls the pieces.
    """
    view.time.require()
    positions = fitted_positions(view)
    if not view.measured.is_finite or not bool(view.expected.isfinite().all()):
        return NoShares("a gradient is not finite")
    gradients = []
    for number, piece in enumerate(pieces):
        view.time.show(f"{number} of {len(pieces)} {name}")
        gradients.append(view.examples.gradient(piece)[positions])
    usable = [n for n, g in enumerate(gradients) if bool(g.isfinite().all()) and bool(g.any())]
    if not usable:
        return NoShares(f"none of the {name} has a gradient of its own")
    matrix = torch.stack([gradients[n] for n in usable])
    if len(positions) < len(usable) + max(2, len(usable) // SPARE_PART):
        return NoShares(
            f"{len(usable)} {name} cannot be told apart by only {len(positions)} elements"
        )
    expected, measured = view.expected[positions], view.measured.by_rank[:, positions]
    worst_condition = min(WORST_CONDITION, 0.5 / torch.finfo(view.setting.dtype).eps)
    fit = fitted_mixture(matrix, torch.stack([expected, *measured]), worst_condition)
    if fit.weights is None:
        shown = text_of(fit.condition, ".1e")
        return NoShares(f"the gradients of the {name} are too alike (condition number {shown})")
    in_big_batch, in_ranks = fit.weights[0], fit.weights[1:]
    words = "the ranks' shards" if name == "ranks" else name
    left = _relative_norm(expected - in_big_batch @ matrix, expected)
    if left > NEGLIGIBLE:
        return NoShares(
            f"the loss is not a sum over {words}, whose gradients leave {text_of(left, '.2g')} of "
            "the big batch's gradient unexplained",
        )
    if bool((in_big_batch.abs() < NO_SHARE * in_big_batch.abs().max()).any()):
        return NoShares(f"some {name} do not count in the big batch")
    by_rank, unexplained = {}, {}
    for row, rank in enumerate(view.setting.reporting_ranks):
        shares = dict(zip(usable, (in_ranks[row] / in_big_batch).tolist(), strict=True))
        by_rank[rank] = tuple(shares.get(n) for n in range(len(pieces)))
        residual = measured[row] - in_ranks[row] @ matrix
        unexplained[rank] = _relative_norm(residual, measured[row])
    worst = max(unexplained.values())
    if worst > MOST_LEFT:
        return NoShares(
            f"no weights of {words} come near: {text_of(worst, '.2g')} of the norm is left over",
            left_over=worst,
        )
    return ShareFit(by_rank, unexplained, fit.condition)


def fitted_positions(view: View) -> Tensor:
    """The positions of the elements that are fitted.

    If some parameters are right, only the elements of the others are fitted.
    """
    names = view.parameters.names
    if view.measured.only_some_parameters_differ:
        names = tuple(name for name in names if name in view.measured.differing)
    return view.parameters.positions_of(names)


def _relative_norm(residual: Tensor, whole: Tensor) -> float:
    return float(residual.norm()) / max(float(whole.norm()), SMALLEST_NORM)


MAX_ELEMENTS = 2_000_000
"""Up to this many ranks x elements, the diagnosis keeps all elements; of more it keeps some."""

MAX_SELECTED = 200_000
"""The ranks x elements that are then kept: enough to tell causes apart, few beside the model."""


def kept_elements(expected: Expected, world_size: int) -> ElementSample[GradientKey]:
    """The elements that are kept of the gradients that so many ranks send."""
    sizes = {
        key: value.numel()
        for key, value in expected.reference.expected.items()
        if value is not None
    }
    if sum(sizes.values()) * world_size <= MAX_ELEMENTS:
        return ElementSample.at_most(MAX_ELEMENTS, sizes)
    return ElementSample.at_most(MAX_SELECTED // world_size, sizes)
