"""The numbers that each rank's loss, the reduction and the loss of the big batch divide by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.diagnosis.divisor_candidates import all_divisors, all_weights
from ddp_equivalence.diagnosis.residual import nearly_equal, unexplained
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
    for unit, counts in counts_of_parts(view, shards).items():
        total = sum(counts)
        if total <= 0 or not is_weighted_mean(view, shards, counts):
            continue
        right_factors = _right_factors([count / total for count in counts], weights)
        return Divisors("mean", unit, tuple(counts), total, _divisor(weights), right_factors)
    return None


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
