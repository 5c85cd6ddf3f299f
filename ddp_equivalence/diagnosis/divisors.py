"""The numbers that a loss, the reduction and the loss of the big batch divide by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp, isclose
from typing import Literal

import torch
from torch import Tensor

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.batch_tree import leaves_of, name_of_leaf
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.losses.token_mean import PADDING
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.example_gradients import LossAndGradient
from ddp_equivalence.diagnosis.lines.of_reduction import common_factor
from ddp_equivalence.diagnosis.residual import FITTED, NEGLIGIBLE, nearly_equal, unexplained
from ddp_equivalence.diagnosis.setting import all_divisors, all_weights
from ddp_equivalence.diagnosis.view import View
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

    That is so if no count of the batch, used as weight, makes the mean of the shards the big batch.
    """
    if view.parts.by_rank is None or view.world_size == 1:
        return None
    weights = _common_weights(view)
    if view.parts.add_up_to_the_big_batch:
        ones = (1.0,) * view.world_size
        return Divisors("sum", "", ones, 1.0, _divisor(weights), _right_factors(ones, weights))
    shards = view.parts.examples_by_rank
    for unit, counts in counts_that_fit(view, shards):
        total = sum(counts)
        right_factors = _right_factors([count / total for count in counts], weights)
        return Divisors("mean", unit, tuple(counts), total, _divisor(weights), right_factors)
    return None


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
        {**all_divisors(batch, len(part)), **all_weights(batch)}
        for batch, part in zip(batches, parts, strict=True)
    ]
    whole = setting.batch
    for unit in (*all_divisors(whole, setting.example_count), *all_weights(whole)):
        candidates.setdefault(unit, [counts.get(unit, 0.0) for counts in counts_by_rank])
    loss = view.setting.case.loss
    if isinstance(loss, str):
        normalisers = [LOSSES[loss].normalisers(batch) for batch in batches]
        if all(len(terms) == 1 for terms in normalisers):
            candidates[f"units of {loss}"] = [terms[0].count for terms in normalisers]
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
    whole = [tuple(range(view.setting.example_count))]
    wrong = list(_counts_of_the_whole(view))
    for right_unit in right_units(view):
        right = counts_of_parts(view, whole)[right_unit][0]
        for count, unit, of_all in wrong if right == round(right) else ():
            if count != right and isclose(right / count, factor, rel_tol=NEGLIGIBLE):
                held = factor * view.expected
                one = WrongCount((count,), unit, right, right_unit, held, of_all)
                found.setdefault(count, one)
    return list(found.values())


def right_units(view: View) -> list[str]:
    """What the loss of the big batch may divide by: a part of it shows which counts are right."""
    count = view.setting.example_count
    if count < 2:
        return []
    cut = -(-count // 3)
    parts = [tuple(range(cut)), tuple(range(cut, count))]
    return [unit for unit, _ in counts_that_fit(view, parts)]


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
    right_ones = right_units(view)
    choices = [
        (unit + words, tuple(times * count for count in counts))
        for words, times, parts in _parts_counted(view)
        for unit, counts in counts_of_parts(view, parts).items()
        if min(counts) > 0 and (words or unit not in right_ones)
    ]
    for right_unit in right_ones:
        right = counts_of_parts(view, pieces)[right_unit]
        for unit, counts in choices:
            by_piece = [one for one, own in zip(counts, by_rank, strict=True) for _ in own]
            wanted = [a / (size * m) for a, m in zip(right, by_piece, strict=True)]
            if not _weigh_alike(weights[0], wanted) or _is_one_factor(right, wanted):
                continue
            held = torch.tensor(wanted, dtype=gradients.dtype) @ gradients
            found.append(WrongCount(counts, unit, sum(right), right_unit, held))
    return found


def _weigh_alike(weights: Tensor, wanted: Sequence[float]) -> bool:
    expected = torch.tensor(wanted, dtype=weights.dtype)
    return float((weights - expected).abs().max()) <= FITTED * float(expected.abs().max())


def _is_one_factor(right: Sequence[float], wanted: Sequence[float]) -> bool:
    factors = [weight / count for weight, count in zip(wanted, right, strict=True) if count]
    return max(factors) - min(factors) <= FITTED * max(factors)


# The weights of classes that a loss divides by, as ``nn.CrossEntropyLoss(weight=...)`` does.

MOST_CLASSES = 12
"""The gradient of every class is computed alone, so that more of them would take long."""

MOST_SHOWN = 4

ONLY_ONE = 1e-6
"""The weights are determined if the second smallest eigenvalue is at least this, relative to the
largest: with the smallest one, rounding leaves about 1e-16."""


@dataclass(frozen=True)
class ClassWeights:
    """``name``: of the leaf of the batch that says each example's class. ``labels``: the class of
    each example. ``weights``: of each class, the smallest being 1: no gradient shows their scale.
    """

    name: str
    labels: tuple[int, ...]
    weights: dict[int, float]

    def sum_of(self, examples: Indices) -> float:
        """What the loss of these examples divides by."""
        return sum(self.weights.get(self.labels[index], 0.0) for index in examples)

    @property
    def text(self) -> str:
        """In words, with the classes in their order."""
        shown = list(islice(self.weights.items(), MOST_SHOWN))
        more = ", ..." if len(shown) < len(self.weights) else ""
        classes = ", ".join(str(label) for label, _ in shown)
        weights = " : ".join(text_of(weight, ".4g") for _, weight in shown)
        return f"weights ({weights}{more}) of the classes {classes}{more} in {self.name}"


def class_weights(view: View, parts: Sequence[Indices]) -> ClassWeights | None:
    """The weights with which the classes of the big batch, and its parts, make its gradient.

    None if there are none, or they are not determined, or are no weights because they are negative.
    That they fit is no accident: every element of the gradient is an equation for a few of them,
    and that the parts are weighted by their sums is another one.
    """
    setting = view.setting
    if setting.has_batch_norm or setting.batch_coupled or view.examples.draws_random_numbers:
        return None  # then the gradient of a part is not what it is in the big batch
    for name, labels in _labels(view):
        weights = _solved(view, labels)
        if weights is None:
            continue
        found = ClassWeights(name, labels, weights)
        if is_weighted_mean(view, parts, [found.sum_of(part) for part in parts]):
            return found
    return None


def _labels(view: View) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The leaves that hold a whole number for each example, with some of them more than once."""
    count = view.setting.example_count
    for path, leaf in leaves_of(view.setting.batch):
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.is_complex():
            continue
        if leaf.numel() != count or leaf.shape[:1] != (count,):
            continue
        labels = tuple(leaf.flatten().tolist())
        if 1 < len(set(labels) - {PADDING}) <= min(MOST_CLASSES, count - 1):
            yield name_of_leaf(path), labels


def _solved(view: View, labels: tuple[int, ...]) -> dict[int, float] | None:
    """The weights for which the gradients of the classes, each a mean, make that of the batch."""
    classes = sorted(set(labels) - {PADDING})
    examples = [tuple(i for i, own in enumerate(labels) if own == label) for label in classes]
    means = [view.examples.gradient(of_class) for of_class in examples]
    if not all(bool(mean.isfinite().all()) for mean in means):
        return None
    away = [len(own) * (mean - view.expected) for own, mean in zip(examples, means, strict=True)]
    inner = [[float(one @ other) for other in away] for one in away]
    values, vectors = torch.linalg.eigh(torch.tensor(inner, dtype=torch.float64))
    if float(values[1]) < ONLY_ONE * float(values[-1]):
        return None
    weights = vectors[:, 0] / vectors[:, 0].sum()
    if float(weights.min()) <= 0:
        return None
    sums = [float(weight) * len(own) for weight, own in zip(weights, examples, strict=True)]
    mixed = sum((one * mean for one, mean in zip(sums, means, strict=True)), start=means[0] * 0)
    if not nearly_equal(view.expected, mixed / sum(sums)):
        return None
    least = float(weights.min())
    return {label: float(one) / least for label, one in zip(classes, weights, strict=True)}


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
    """True if one weight gives both the loss and the gradient of the whole from the two parts."""
    one, other = parts
    difference = one.loss - other.loss
    if abs(difference) < 1e-9 * max(abs(one.loss), abs(other.loss)):
        return nearly_equal(whole.gradient, (one.gradient + other.gradient) / 2)
    weight = (whole.loss - other.loss) / difference
    if not 0 < weight < 1:
        return False
    return nearly_equal(whole.gradient, weight * one.gradient + (1 - weight) * other.gradient)
