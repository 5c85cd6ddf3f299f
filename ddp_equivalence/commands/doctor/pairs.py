"""Chooses which pairs of GPUs are tried where there are too many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

MAX_PAIRS = 28
"""All pairs of 8 GPUs. A pair takes some seconds."""


@dataclass(frozen=True)
class Pairs:
    """Both in the order of their numbers."""

    chosen: tuple[tuple[int, int], ...]
    left_out: tuple[tuple[int, int], ...]


def chosen_pairs(gpus: Sequence[int], most: int = MAX_PAIRS) -> Pairs:
    """At most so many pairs of these GPUs, neighbours first, so that every GPU is in one."""

    def distance(pair: tuple[int, int]) -> int:
        apart = gpus.index(pair[1]) - gpus.index(pair[0])
        return min(apart, len(gpus) - apart)  # the last is the neighbour of the first

    pairs = sorted(combinations(gpus, 2), key=distance)
    return Pairs(tuple(sorted(pairs[:most])), tuple(sorted(pairs[most:])))
