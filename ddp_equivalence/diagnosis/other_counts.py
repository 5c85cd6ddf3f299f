"""Counts of the batch that a loss may divide by in place of the right one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isclose

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.divisors import counts_of_parts, is_weighted_mean
from ddp_equivalence.diagnosis.lines.lines_of_reduction import common_factor
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.strategies.sharded_batch import Indices

EXACT = 1e-6
"""A factor is the ratio of two counts if it differs by less, relative to it."""

OF_WEIGHTS = 1e-4
"""The same of weights that were determined by least squares, before a prediction is tried."""

MOST_RANKS = 4
"""With more ranks, the counts of the first ones are listed."""


@dataclass(frozen=True)
class Count:
    """A number that a loss may divide by: the ``value``, and the words for it.

    ``of_all``: it is a count of the whole batch, of which each rank may have an equal part.
    """

    value: float
    unit: str
    of_all: bool = False


@dataclass(frozen=True)
class RatioOfCounts:
    """The gradient has the factor ``right / wrong``, because the loss divides by ``wrong``."""

    right: Count
    wrong: Count

    @property
    def factor(self) -> float:
        return self.right.value / self.wrong.value

    @property
    def text(self) -> str:
        wrong, right = (text_of(one.value, ".6g") for one in (self.wrong, self.right))
        return f"divided by {wrong}, {self.wrong.unit}, instead of {right}, {self.right.unit}"


@dataclass(frozen=True)
class CountsByRank:
    """Each rank's loss divides by a count of its own, which is not the one that is right.

    ``held``: what every rank then holds. ``right_unit``: what the big batch divides by.
    """

    held: Tensor
    counts: tuple[float, ...]
    unit: str
    right_unit: str
    total: float

    @property
    def text(self) -> str:
        shown = ", ".join(text_of(one, ".6g") for one in self.counts[:MOST_RANKS])
        more = ", ..." if len(self.counts) > MOST_RANKS else ""
        total = text_of(self.total, ".6g")
        return (
            f"divided by {shown}{more} (by rank), {self.unit}; the big batch divides by {total}, "
            f"{self.right_unit}"
        )


def ratio_of_counts(view: View) -> list[RatioOfCounts]:
    """The pairs of counts whose ratio is exactly the factor that all gradients have."""
    held = common_factor(view) if view.measured.is_known else None
    if held is None or not _counts_matter(view):
        return []
    found: dict[float, RatioOfCounts] = {}
    whole = [tuple(range(view.setting.example_count))]
    wrong = list(_counts_of_the_whole(view))
    for unit in right_units(view):
        right = Count(counts_of_parts(view, whole)[unit][0], unit)
        for count in wrong:
            one = RatioOfCounts(right, count)
            whole_numbers = right.value == round(right.value)
            if (
                whole_numbers
                and count.value != right.value
                and isclose(one.factor, held, rel_tol=EXACT)
            ):
                found.setdefault(count.value, one)
    return list(found.values())


def right_units(view: View) -> list[str]:
    """What the loss of the big batch may divide by: a part of it shows which counts are right."""
    count = view.setting.example_count
    if count < 2:
        return []
    cut = -(-count // 3)
    parts = [tuple(range(cut)), tuple(range(cut, count))]
    return [
        unit
        for unit, counts in counts_of_parts(view, parts).items()
        if min(counts) >= 0 and sum(counts) > 0 and is_weighted_mean(view, parts, counts)
    ]


def _counts_matter(view: View) -> bool:
    """False where the loss is a sum, or no mean over terms of single examples."""
    setting = view.setting
    if setting.has_batch_norm or setting.batch_coupled or view.examples.draws_random_numbers:
        return False
    if torch.finfo(setting.dtype).eps > torch.finfo(torch.float32).eps:
        return False
    return not view.parts.add_up_to_the_big_batch


def _counts_of_the_whole(view: View) -> Iterator[Count]:
    """All counts that one loss, or all ranks together, may divide the whole gradient by."""
    whole: Indices = tuple(range(view.setting.example_count))
    for unit, counts in counts_of_parts(view, [whole]).items():
        yield from _not_zero(counts[0], unit, of_all=True)
    by_rank, ranks = view.parts.by_rank, view.world_size
    if by_rank is None:
        return
    if ranks > 1:
        for unit, counts in counts_of_parts(view, view.parts.examples_by_rank[:1]).items():
            of_rank = f"{unit} of rank 0, times {ranks} ranks"
            yield from _not_zero(counts[0] * ranks, of_rank)
    number = view.parts.micro_batches_per_rank
    if number is None or number == 1:
        return
    for place, name in ((0, "first"), (-1, "last")):
        at_once = tuple(index for parts in by_rank for index in parts[place])
        for unit, counts in counts_of_parts(view, [at_once]).items():
            of_part = f"{unit} of the {name} micro-batch"
            yield from _not_zero(counts[0], of_part)
            yield from _not_zero(counts[0] * number, f"{of_part}, times {number} micro-batches")


def _not_zero(value: float, unit: str, of_all: bool = False) -> Iterator[Count]:
    if value > 0:
        yield Count(value, unit, of_all)


def counts_by_rank(view: View) -> list[CountsByRank]:
    """The counts of its own that each rank may have divided by, as the ranks' weights show.

    Only those whose ratio to the right count is not the same on all ranks: the others are one
    factor of the whole gradient.
    """
    by_rank = view.parts.by_rank
    if not view.measured.is_known or by_rank is None or view.world_size == 1:
        return []
    if not _counts_matter(view):
        return []
    pieces = [part for parts in by_rank for part in parts]
    gradients = torch.stack([view.examples.gradient(part) for part in pieces])
    weights = view.measured.weights_of(gradients)
    if weights is None or not nearly_equal(weights, weights[:1].expand_as(weights)):
        return []
    found: list[CountsByRank] = []
    for right_unit in right_units(view):
        right = counts_of_parts(view, pieces)[right_unit]
        for unit, counts, by_piece in _divisors_by_piece(view, by_rank):
            wanted = [a / (view.world_size * m) for a, m in zip(right, by_piece, strict=True)]
            if not _weigh_alike(weights[0], wanted) or _is_one_factor(right, wanted):
                continue
            if _is_a_mean_of_means(view, right, wanted):
                continue
            held = torch.tensor(wanted, dtype=gradients.dtype) @ gradients
            found.append(CountsByRank(held, counts, unit, right_unit, sum(right)))
    return found


def _weigh_alike(weights: Tensor, wanted: Sequence[float]) -> bool:
    expected = torch.tensor(wanted, dtype=weights.dtype)
    return float((weights - expected).abs().max()) <= OF_WEIGHTS * float(expected.abs().max())


def _is_one_factor(right: Sequence[float], wanted: Sequence[float]) -> bool:
    factors = [weight / count for weight, count in zip(wanted, right, strict=True) if count]
    return max(factors) - min(factors) <= OF_WEIGHTS * max(factors)


def _is_a_mean_of_means(view: View, right: Sequence[float], wanted: Sequence[float]) -> bool:
    """True if these are the weights of micro-batches or ranks that count equally."""
    by_rank = [len(parts) for parts in view.parts.by_rank or ()]
    of_rank: list[float] = []
    equal: list[float] = []
    for count in by_rank:
        own = right[len(of_rank) : len(of_rank) + count]
        of_rank += [one / sum(own) / view.world_size if sum(own) else 0.0 for one in own]
        equal += [1 / count / view.world_size] * count
    return any(_weigh_alike(torch.tensor(wanted), one) for one in (of_rank, equal))


def _divisors_by_piece(
    view: View, by_rank: Sequence[Sequence[Indices]]
) -> Iterator[tuple[str, tuple[float, ...], list[float]]]:
    """What each rank may divide by: the unit, the number of each rank, and that of each piece.

    The right unit is among them only for the first or the last micro-batch: the rank's own right
    count is that of another cause.
    """
    shards = view.parts.examples_by_rank
    right = right_units(view)
    choices: list[tuple[str, float, Sequence[Indices]]] = [("", 1.0, shards)]
    number = view.parts.micro_batches_per_rank or 1
    if number > 1:
        for place, name in ((0, "first"), (-1, "last")):
            chosen = [parts[place] for parts in by_rank]
            choices.append((f" of the rank's {name} micro-batch", 1.0, chosen))
            full = f" of the rank's {name} micro-batch, times {number} micro-batches"
            choices.append((full, float(number), chosen))
    for words, times, parts in choices:
        for unit, counts in counts_of_parts(view, parts).items():
            if min(counts) <= 0 or (not words and unit in right):
                continue
            numbers = tuple(times * count for count in counts)
            by_piece = [one for one, own in zip(numbers, by_rank, strict=True) for _ in own]
            yield unit + words, numbers, by_piece
