"""The numbers that a loss, the reduction and the loss of the big batch divide by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isclose, prod
from typing import Literal

import torch
from torch import Tensor

from ddp_equivalence.case.batch import take
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.example_gradients import (
    Divided,
    LossAndGradient,
    operations_of_the_loss,
)
from ddp_equivalence.diagnosis.lines.of_reduction import common_factor
from ddp_equivalence.diagnosis.lines.origins import divisor_text
from ddp_equivalence.diagnosis.residual import (
    FITTED,
    NEGLIGIBLE,
    fitted_mixture,
    nearly_equal,
    unexplained,
)
from ddp_equivalence.diagnosis.setting import all_divisors
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine, Operation, Operations, Value
from ddp_equivalence.strategies.sharded_batch import Indices

EQUAL = 1e-3
"""Two weights of ranks count as equal if they differ by less than this."""


@dataclass(frozen=True)
class Divisors:
    """The numbers that losses and gradients are divided by.

    ``kind``: "mean" if the big batch is the mean of the ranks' shards, each weighted by its count
    of ``unit``; "sum" if the big batch is the sum of the shards. ``counts``: what each rank's loss
    divides by. ``big_batch``: what the loss of the big batch divides by. ``reduction``: what the
    ranks' gradients are divided by when they are reduced, None if they do not count equally.
    ``right_factors``: for each rank, the factor on its loss that would give the big batch; None if
    it cannot be determined.
    """

    kind: Literal["mean", "sum"]
    unit: str
    counts: tuple[float, ...]
    big_batch: float
    reduction: float | None
    right_factors: tuple[float, ...] | None


def find_divisors(view: View) -> Divisors | None:
    """The divisors; None if they cannot be determined.

    That is so if no weights make the mean of the shards the big batch.
    """
    if view.parts.by_rank is None or view.world_size == 1:
        return None
    weights = _common_weights(view)
    if view.parts.add_up_to_the_big_batch:
        ones = (1.0,) * view.world_size
        return Divisors("sum", "", ones, 1.0, _divisor(weights), _right_factors(ones, weights))
    shards = view.parts.examples_by_rank
    found = what_it_divides_by(view, shards)
    if found is None:
        return None
    total = sum(found.counts)
    right_factors = _right_factors([count / total for count in found.counts], weights)
    return Divisors("mean", found.unit, found.counts, total, _divisor(weights), right_factors)


@dataclass(frozen=True)
class Amounts:
    """What the loss of the case divides by, in words, how much of it each part has, and the line
    that divides, if it was seen.
    """

    unit: str
    counts: tuple[float, ...]
    line: CodeLine | None = None

    @property
    def is_count(self) -> bool:
        whole = all(one == round(one) for one in self.counts)
        return whole and self.unit != OF_CLASSES


def what_it_divides_by(view: View, parts: Sequence[Indices]) -> Amounts | None:
    """What the loss of the case divides by.

    It is the number of examples, else what the loss was seen to divide by, else a count of the
    batch, else what the gradients show, of which 1 is the amount of the whole batch. None if the
    big batch is not the mean of the parts, each weighted by an amount of its own.
    """
    examples = tuple(float(len(part)) for part in parts)
    if sum(examples) and is_weighted_mean(view, parts, examples):
        return Amounts("examples", examples)
    weights = weights_of_parts(view, parts)
    read = None if weights is None else _read_from_the_loss(view, parts, weights)
    if read is not None:
        return read
    unit, counts = next(counts_that_fit(view, parts), (OF_ITS_OWN, weights))
    return None if counts is None else Amounts(unit, tuple(counts))


def what_its_terms_divide_by(view: View, parts: Sequence[Indices]) -> list[Amounts]:
    """What each term divides by, of those that depend on the examples, where the loss of the case
    is a sum of terms; [] if it is none, or if a term is no mean over parts.
    """
    whole = view.examples.terms(tuple(range(view.setting.example_count))) if parts else []
    of_parts = [view.examples.terms(part) for part in parts] if whole else []
    if any(len(terms) != len(whole) for terms in of_parts):
        return []
    examples = torch.tensor([float(len(part)) for part in parts], dtype=torch.float64)
    found = []
    for number, right in enumerate(whole):
        gradients = torch.stack([terms[number] for terms in of_parts])
        if nearly_equal(gradients, right.expand_as(gradients)):
            continue  # it does not depend on the examples
        weights = _mean_with(gradients, right)
        if weights is None:
            return []
        if nearly_equal(right, examples @ gradients / examples.sum()):
            found.append(Amounts("examples", tuple(examples.tolist())))
        else:
            read = _read_from_the_loss(view, parts, weights)
            found.append(read or Amounts(OF_ITS_OWN, tuple(weights)))
    return found


def counts_that_fit(view: View, parts: Sequence[Indices]) -> Iterator[tuple[str, list[float]]]:
    """The units whose counts, as weights, make the mean of the parts' gradients the big batch."""
    for unit, counts in counts_of_parts(view, parts).items():
        is_weight = sum(counts) > 0 and min(counts) >= 0
        if is_weight and is_weighted_mean(view, parts, counts):
            yield unit, counts


def is_weighted_mean(view: View, parts: Sequence[Indices], counts: Sequence[float]) -> bool:
    """True if the big batch is the mean of the parts' gradients, weighted by these counts."""
    mean, total = torch.zeros_like(view.expected), sum(counts)
    for count, examples in zip(counts, parts, strict=True):
        if count:
            mean = mean + count / total * view.examples.gradient(examples)
    return nearly_equal(mean, view.expected)


def counts_of_parts(view: View, parts: Sequence[Indices]) -> Mapping[str, list[float]]:
    """What the loss of each part may divide by: unit -> the count of every part, examples first."""
    candidates: dict[str, list[float]] = {"examples": [float(len(part)) for part in parts]}
    setting = view.setting
    batches = [take(setting.batch, part, setting.case.batch_dims) for part in parts]
    counts_by_rank = [
        all_divisors(batch, len(part)) for batch, part in zip(batches, parts, strict=True)
    ]
    for unit in all_divisors(setting.batch, setting.example_count):
        candidates.setdefault(unit, [counts.get(unit, 0.0) for counts in counts_by_rank])
    return candidates


def _common_weights(view: View) -> list[float] | None:
    """The weight of each rank's contribution; None unless all ranks hold the same mixture."""
    contributions = view.parts.contributions()
    if contributions is None:
        return None
    weights = view.measured.weights_of(contributions)
    if weights is None or not bool((weights - weights[0]).abs().max() < EQUAL):
        return None
    if unexplained(view.measured.by_rank, weights @ contributions) > EQUAL:
        return None
    return [float(weight) for weight in weights[0]]


def _divisor(weights: list[float] | None) -> float | None:
    """The divisor of the reduction, if all ranks have the same weight."""
    if weights is None or not weights[0]:
        return None
    if max(weights) - min(weights) > EQUAL * abs(weights[0]):
        return None
    return 1 / weights[0]


def _right_factors(
    wanted: Sequence[float], weights: list[float] | None
) -> tuple[float, ...] | None:
    """The factors that would give each rank the weight that it should have."""
    if weights is None or not all(abs(weight) > EQUAL for weight in weights):
        return None
    return tuple(want / weight for want, weight in zip(wanted, weights, strict=True))


MOST_RANKS = 4
"""With more ranks, the counts of the first ones are listed."""


@dataclass(frozen=True)
class WrongCount:
    """The ranks' losses divide by a count of the batch that is not the right one.

    ``counts``: the count of each rank; a single one if the whole gradient has one factor.
    ``total``: what the big batch divides by, and ``right_unit``: what this counts. ``of_all``: it
    is a count of the whole batch, of which each rank may have an equal part. ``held``: what every
    rank holds then.
    """

    counts: tuple[float, ...]
    unit: str
    total: float
    right_unit: str
    held: Tensor
    of_all: bool = False

    @property
    def factor(self) -> float:
        """The factor of the whole gradient."""
        return self.total / self.counts[0]

    @property
    def text(self) -> str:
        shown = ", ".join(text_of(one, ".6g") for one in self.counts[:MOST_RANKS])
        shown += ", ..." if len(self.counts) > MOST_RANKS else ""
        shown += " (by rank)" if len(self.counts) > 1 else ""
        total = text_of(self.total, ".6g")
        return f"divided by {shown}, {self.unit}, instead of {total}, {self.right_unit}"


def ratio_of_counts(view: View) -> list[WrongCount]:
    """The counts whose ratio to a right one is exactly the factor that all gradients have."""
    factor = common_factor(view) if view.measured.is_known else None
    if factor is None or not _counts_matter(view):
        return []
    found: dict[float, WrongCount] = {}
    wrong = list(_counts_of_the_whole(view))
    for right_unit, right in _right_totals(view):
        for count, unit, of_all in wrong:
            if count != right and isclose(right / count, factor, rel_tol=NEGLIGIBLE):
                held = factor * view.expected
                one = WrongCount((count,), unit, right, right_unit, held, of_all)
                found.setdefault(count, one)
    return list(found.values())


def _right_totals(view: View) -> Iterator[tuple[str, float]]:
    """What the loss of the big batch may divide by, and how much of it there is: what it was seen
    to divide by, and whole numbers that may be counted in the batch.
    """
    parts, read = _two_parts(view), what_the_big_batch_divides_by(view)
    if read is not None:
        yield read.unit, sum(read.counts)
    for unit, counts in counts_that_fit(view, parts) if parts else ():
        if sum(counts) == round(sum(counts)):
            yield unit, sum(counts)


def what_the_big_batch_divides_by(view: View) -> Amounts | None:
    """What the loss of the case was seen to divide by, for two parts of the big batch."""
    parts = _two_parts(view)
    weights = weights_of_parts(view, parts) if parts else None
    return None if weights is None else _read_from_the_loss(view, parts, weights)


def _two_parts(view: View) -> list[Indices]:
    """Two parts of the big batch, which show which counts are right; [] if it cannot be cut."""
    count = view.setting.example_count
    cut = -(-count // 3)
    return [tuple(range(cut)), tuple(range(cut, count))] if count > 1 else []


def _counts_matter(view: View) -> bool:
    """False where the loss is a sum, or no mean over terms of single examples."""
    setting = view.setting
    if setting.has_batch_norm or setting.batch_coupled or view.examples.draws_random_numbers:
        return False
    if torch.finfo(setting.dtype).eps > torch.finfo(torch.float32).eps:
        return False
    return not view.parts.add_up_to_the_big_batch


def _parts_counted(view: View) -> Iterator[tuple[str, int, list[Indices]]]:
    """The part of each rank whose count its loss may divide by: words for it, the number by which
    this count is multiplied, and the part's examples on each rank.
    """
    yield "", 1, view.parts.examples_by_rank
    number = view.parts.micro_batches_per_rank or 1
    for place, name in ((0, "first"), (-1, "last")) if number > 1 else ():
        parts = [of_rank[place] for of_rank in view.parts.by_rank or ()]
        yield f" of the {name} micro-batch", 1, parts
        yield f" of the {name} micro-batch, times {number} micro-batches", number, parts


def _counts_of_the_whole(view: View) -> Iterator[tuple[float, str, bool]]:
    """All counts that one loss, or all ranks together, may divide the whole gradient by, what they
    count, and whether that is the whole batch.
    """
    ranks = view.world_size
    choices = [("", 1, tuple(range(view.setting.example_count)))]
    for words, times, parts in _parts_counted(view) if view.parts.by_rank is not None else ():
        if words:
            choices.append((words, times, tuple(index for part in parts for index in part)))
        elif ranks > 1:
            choices.append((f" of rank 0, times {ranks} ranks", ranks, parts[0]))
    for words, times, examples in choices:
        for unit, counts in counts_of_parts(view, [examples]).items():
            if counts[0] > 0:
                yield counts[0] * times, unit + words, not words


def counts_by_rank(view: View) -> list[WrongCount]:
    """The counts of its own that each rank may have divided by, as the ranks' weights show.

    Only those whose ratio to the right count is not the same on all ranks: the others are one
    factor of the whole gradient. A rank's own right count is that of another cause.
    """
    by_rank, size = view.parts.by_rank, view.world_size
    if not view.measured.is_known or by_rank is None or size == 1 or not _counts_matter(view):
        return []
    pieces = [part for parts in by_rank for part in parts]
    gradients = torch.stack([view.examples.gradient(part) for part in pieces])
    weights = view.measured.weights_of(gradients)
    if weights is None or not nearly_equal(weights, weights[:1].expand_as(weights)):
        return []
    found: list[WrongCount] = []
    right = what_it_divides_by(view, pieces)
    if right is None:
        return []
    of_rank = [rank for rank, parts in enumerate(by_rank) for _ in parts]
    own = [0.0] * size
    for rank, count in zip(of_rank, right.counts, strict=True):
        own[rank] += count
    for words, times, parts in _parts_counted(view):
        for unit, counts in counts_of_parts(view, parts).items():
            if min(counts) <= 0 or (not words and counts == own):
                continue
            wanted = [
                count / (size * times * counts[rank])
                for rank, count in zip(of_rank, right.counts, strict=True)
            ]
            if not _weigh_alike(weights[0], wanted) or _is_one_factor(right.counts, wanted):
                continue
            held = torch.tensor(wanted, dtype=gradients.dtype) @ gradients
            by_times = tuple(times * count for count in counts)
            total = sum(right.counts)
            found.append(WrongCount(by_times, unit + words, total, right.unit, held))
    return found


def _weigh_alike(weights: Tensor, wanted: Sequence[float]) -> bool:
    expected = torch.tensor(wanted, dtype=weights.dtype)
    return float((weights - expected).abs().max()) <= FITTED * float(expected.abs().max())


def _is_one_factor(right: Sequence[float], wanted: Sequence[float]) -> bool:
    factors = [weight / count for weight, count in zip(wanted, right, strict=True) if count]
    return max(factors) - min(factors) <= FITTED * max(factors)


# What the loss of the case was seen to divide by, and with which weights its parts make the whole.

SPARE = 3
"""There must be so many more elements than parts, or weights would be found for any gradient."""

A_COUNT = "a count of its own"
OF_ITS_OWN = "counts that are not those of its examples"
OF_CLASSES = "the weights of the targets' classes"

OF_TARGETS = ("nll_loss_forward", "nll_loss2d_forward")
"""Torch's operations of a cross-entropy, which return the loss and what it is divided by."""


def weights_of_parts(view: View, parts: Sequence[Indices]) -> list[float] | None:
    """The weights with which the losses and the gradients of the parts make those of the big batch.

    They add up to 1, so that each loss is a mean over a count of its own. That they fit is no
    accident: every element of the gradient is an equation for them, and the losses are another one.
    None if there are no such weights. A part without a loss of its own has the weight 0.
    """
    whole = view.examples.compute(tuple(range(view.setting.example_count)))
    computed = [view.examples.compute(part) for part in parts]
    known = [n for n, one in enumerate(computed) if bool(one.gradient.isfinite().all())]
    if len(known) < 2:
        return None
    fitted = _mean_with(torch.stack([computed[n].gradient for n in known]), view.expected)
    if fitted is None or not _is_weighted_mean(whole, [computed[n] for n in known]):
        return None
    weights = dict(zip(known, fitted, strict=True))
    return [weights.get(n, 0.0) for n in range(len(parts))]


def _mean_with(gradients: Tensor, mean: Tensor) -> list[float] | None:
    """The weights, none of them negative, of which these gradients have this mean; None without
    any, or if such weights would be found for anything.
    """
    if len(gradients) + SPARE > len(mean):
        return None
    fitted = fitted_mixture(gradients, mean[None]).weights
    if fitted is None or not nearly_equal(mean, fitted[0] @ gradients):
        return None
    weights: list[float] = fitted[0].tolist()
    is_mean = isclose(sum(weights), 1, rel_tol=NEGLIGIBLE) and min(weights) > 0
    return weights if is_mean else None


def _read_from_the_loss(
    view: View, parts: Sequence[Indices], weights: Sequence[float]
) -> Amounts | None:
    """What the loss of the case divides by, and how much of it each of these parts has; None if no
    number by which it was seen to divide has these weights.
    """
    known = [n for n, weight in enumerate(weights) if weight]
    whole = tuple(range(view.setting.example_count))
    found = [_numbers_divided_by(view, part) for part in (*(parts[n] for n in known), whole)]
    for place, (total, unit) in reversed([*found[-1].items()]):
        counts = {n: one[place][0] for n, one in zip(known, found, strict=False) if place in one}
        if len(counts) == len(known) and all(
            isclose(count, weights[n] * total, rel_tol=NEGLIGIBLE) for n, count in counts.items()
        ):
            by_part = tuple(counts.get(n, 0.0) for n in range(len(parts)))
            return Amounts(unit, by_part, place[0])
    return None


def _numbers_divided_by(view: View, part: Indices) -> Divided:
    """Where the loss of the case may divide when it computes this part. What stands for a place is
    the same for other parts.
    """
    known = view.examples.divided_by
    if part not in known:
        runs = operations_of_the_loss(view.setting, [part], view.time)
        known[part] = _divided_in(runs[0]) if runs else {}
    return known[part]


def _divided_in(run: Operations) -> Divided:
    found: dict[tuple[CodeLine | None, str, int], tuple[float, str]] = {}
    times = Counter[tuple[CodeLine | None, str]]()
    for one in run.operations:
        place = one.line, one.name
        times[place] += 1
        number = None if one.in_backward else _number_divided_by(run, one)
        if number is not None:
            found[*place, times[place]] = number
    return found


def _number_divided_by(run: Operations, one: Operation) -> tuple[float, str] | None:
    given = [None if value is None else run.values[value] for value in one.given]
    returned = [run.values[value] for value in one.returned if value is not None]
    if one.name in OF_TARGETS and len(returned) == 2:
        number = float(returned[1].tensor)
        return number, _targets_counted(given, number)
    if one.name in ("div", "div_"):
        divisors = [value for value in given[1:] if value is not None and prod(value.shape) == 1]
        numbers = [float(value.tensor) for value in divisors]
        number = next(iter((*numbers, *one.numbers)), 0.0)
        return number, divisor_text(one.line) or A_COUNT
    if one.name in ("mul", "mul_") and one.numbers and one.numbers[0]:
        return 1 / one.numbers[0], A_COUNT
    if given and given[0] is not None and returned and prod(returned[0].shape) == 1:
        verb = "adds up" if one.name == "sum" else "takes the mean of"
        return float(prod(given[0].shape)), f"the elements that it {verb}"
    return None


def _targets_counted(given: Sequence[Value | None], number: float) -> str:
    """What a cross-entropy counts, in words. ``given``: outputs, targets, and weights of classes
    if it has any. ``number``: what it counted.
    """
    if len(given) > 2:
        return OF_CLASSES
    if len(given) < 2 or given[1] is None:
        return "the targets"
    targets = given[1].tensor
    values, times = targets.unique(return_counts=True)
    ignored = values[times == targets.numel() - number]
    return f"the targets that are not {int(ignored[0])}" if len(ignored) else "the targets"


# Asks whether the loss of a batch is made of the losses of its parts, as a mean or a sum is.
#
# Nothing here depends on what the ranks did: only the loss of the case is asked.

Function = Callable[[float], float]

TRANSFORMS: tuple[tuple[str, Function, Function], ...] = (
    ("the square of the loss", lambda loss: loss**2, lambda loss: 2 * loss),
    ("the exponential of the loss", exp, exp),
)
"""What may be a mean where the loss is none: the function of the loss, and its derivative."""

LARGEST_EXPONENT = 100.0

FEWEST_EXAMPLES = 4


def why_not_additive(view: View) -> str:
    """Which function of the loss is a mean over examples, as a clause, if the loss itself is none;
    "" if none was found.
    """
    count = view.setting.example_count
    if count < FEWEST_EXAMPLES or view.setting.earlier_batches:
        return ""
    everything = tuple(range(count))
    whole, *parts = map(view.examples.compute, (everything, everything[::2], everything[1::2]))
    losses = [abs(one.loss) for one in (whole, *parts)]
    if not all(loss < LARGEST_EXPONENT for loss in losses):  # also if one of them is NaN
        return ""
    if _is_weighted_mean(whole, parts):
        return ""
    for name, function, derivative in TRANSFORMS:
        transformed = [
            LossAndGradient(function(one.loss), derivative(one.loss) * one.gradient)
            for one in (whole, *parts)
        ]
        if _is_weighted_mean(transformed[0], transformed[1:]):
            return f"{name} is a mean over examples, and the loss itself is not"
    return ""


def _is_weighted_mean(whole: LossAndGradient, parts: list[LossAndGradient]) -> bool:
    """True if the same weights give both the loss and the gradient of the whole from the parts."""
    weights = _mean_with(torch.stack([one.gradient for one in parts]), whole.gradient)
    loss = sum(weight * one.loss for weight, one in zip(weights or (), parts, strict=False))
    return weights is not None and isclose(loss, whole.loss, rel_tol=NEGLIGIBLE)
