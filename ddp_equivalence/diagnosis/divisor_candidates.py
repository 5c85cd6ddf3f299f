"""What a mean over a batch may divide by: examples, elements, tokens, set flags, weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ddp_equivalence.case.batch_tree import leaves_of, name_of_leaf
from ddp_equivalence.case.losses.token_mean import PADDING

SUMMED = ("len", "num", "count", "size", "weight")
"""Whole numbers are summed only in leaves with one of these in their names: labels never are."""


def all_divisors(batch: Any, examples: int) -> Mapping[str, float]:
    """Every count of this batch, by what is counted: "examples", "elements of targets", ..."""
    divisors: dict[str, float] = {"examples": examples}
    for path, leaf in leaves_of(batch):
        if not isinstance(leaf, Tensor) or leaf.is_complex():
            continue
        leaf = leaf.detach().to_dense()
        name = name_of_leaf(path)
        divisors[f"elements of {name}"] = leaf.numel()
        if bool(((leaf == 0) | (leaf == 1)).all()):
            unit, is_counted = f"elements of {name} that are set", leaf != 0
        elif not leaf.is_floating_point():
            unit, is_counted = f"elements of {name} that are not {PADDING}", leaf != PADDING
        else:
            continue
        divisors[unit] = int(is_counted.sum())
        if is_counted.ndim > 1:
            # A loss on the next token predicts every token of a row except the first.
            divisors[f"{unit}, without the first of each row"] = int(is_counted[:, 1:].sum())
    return divisors


def all_weights(batch: Any) -> Mapping[str, float]:
    """Sums and counts of leaves that may hold weights, lengths, positives, or labels with padding.

    There are many of them, so one should be believed only if it fits several parts of a batch.
    """
    weights: dict[str, float] = {}
    for path, leaf in leaves_of(batch):
        if not isinstance(leaf, Tensor) or leaf.is_complex() or not leaf.numel():
            continue
        leaf, name = leaf.detach().to_dense(), name_of_leaf(path)
        if not leaf.is_floating_point():
            weights[f"elements of {name} above 0"] = int((leaf > 0).sum())
            weights[f"elements of {name} that are not 0"] = int((leaf != 0).sum())
        may_be_summed = leaf.is_floating_point() or any(word in name for word in SUMMED)
        if may_be_summed and bool((leaf >= 0).all()):
            weights[f"the sum of {name}"] = float(leaf.double().sum())
    return weights


def distinct_divisors(batch: Any, examples: int) -> Mapping[str, float]:
    """The counts that are not zero, each number once."""
    units: dict[float, str] = {}
    for unit, count in all_divisors(batch, examples).items():
        units.setdefault(count, unit)
    return {unit: count for count, unit in units.items() if count}
