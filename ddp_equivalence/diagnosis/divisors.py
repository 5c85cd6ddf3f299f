"""Whose mean is it? What the loss divides by, what the ranks do, and what the big batch does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.diagnosis.divisor_candidates import all_counts
from ddp_equivalence.diagnosis.view import View, near, unexplained

AGREE = 1e-3


@dataclass(frozen=True)
class WhoseMean:
    """``kind``: "mean" where the big batch is the mean of the ranks' parts, each counted by its
    ``counts`` of ``what``; "sum" where it is their sum. ``whole``: what the big batch divides by.
    ``divided``: what the ranks' gradients were divided by when they were put together, None if
    they do not count alike. ``right``: the factor on each rank's loss that would make it right.
    """

    kind: Literal["mean", "sum"]
    what: str
    counts: tuple[float, ...]
    whole: float
    divided: float | None
    right: tuple[float, ...] | None


def whose_mean(view: View) -> WhoseMean | None:
    """None where no count of the batch makes the ranks' parts the big batch."""
    if view.parts is None or view.world_size == 1:
        return None
    of_rank = [tuple(i for part in parts for i in part) for parts in view.parts]
    weights = _weights(view)
    if view.is_sum():
        ones = (1.0,) * view.world_size
        return WhoseMean("sum", "", ones, 1.0, _divisor(weights), _right(ones, weights))
    for what, by_rank in _candidates(view, of_rank).items():
        whole = sum(by_rank)
        if whole <= 0:
            continue
        mean = torch.zeros_like(view.expected)
        for count, indices in zip(by_rank, of_rank, strict=True):
            if count:
                mean = mean + count / whole * view.gradient(indices)
        if near(mean, view.expected):
            fractions = [count / whole for count in by_rank]
            return WhoseMean(
                "mean", what, tuple(by_rank), whole, _divisor(weights), _right(fractions, weights)
            )
    return None


def _candidates(view: View, of_rank: Sequence[tuple[int, ...]]) -> Mapping[str, list[float]]:
    """What each rank's loss may divide by: examples first, then what the batch's tensors count."""
    found: dict[str, list[float]] = {"examples": [float(len(indices)) for indices in of_rank]}
    parts = [take(view.batch, indices) for indices in of_rank]
    for what in all_counts(view.batch):
        found.setdefault(what, [all_counts(part).get(what, 0.0) for part in parts])
    if isinstance(view.case.loss, str):
        terms = [LOSSES[view.case.loss].normalisers(part) for part in parts]
        if all(len(of_part) == 1 for of_part in terms):
            found[f"units of {view.case.loss}"] = [of_part[0].count for of_part in terms]
    return found


def _weights(view: View) -> list[float] | None:
    """How much of each rank's own gradient is in what all ranks hold."""
    found = view.contributions()
    weights = None if found is None else view.weights_of(found)
    if found is None or weights is None or not bool((weights - weights[0]).abs().max() < AGREE):
        return None
    if unexplained(view.measured, weights @ found) > AGREE:
        return None
    return [float(weight) for weight in weights[0]]


def _divisor(weights: list[float] | None) -> float | None:
    if weights is None or not weights[0] or max(weights) - min(weights) > AGREE * abs(weights[0]):
        return None
    return 1 / weights[0]


def _right(wanted: Sequence[float], weights: list[float] | None) -> tuple[float, ...] | None:
    if weights is None or not all(abs(weight) > AGREE for weight in weights):
        return None
    return tuple(want / weight for want, weight in zip(wanted, weights, strict=True))
