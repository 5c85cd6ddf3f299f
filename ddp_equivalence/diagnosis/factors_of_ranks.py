"""Whether a factor that all gradients have comes with the number of ranks."""

from __future__ import annotations

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.hypothesis import Indication
from ddp_equivalence.diagnosis.lines.of_reduction import common_factor
from ddp_equivalence.diagnosis.view import View

EQUAL = 1e-4
"""Two factors are equal if they differ by less, relative to the larger one."""


def also_on_one_rank(view: View, factor: float) -> Indication | None:
    """Speaks against a cause that ranks bring about, if one rank leaves the same factor.

    None if all gradients on all ranks have another factor, and if one rank's is not known.
    """
    held = common_factor(view)
    if held is None or not _equal(held, factor):
        return None
    alone = view.factor_on_one_rank()
    if alone is None or not _equal(alone, factor):
        return None
    times = text_of(factor, ".4g")
    because = f"on one rank with the whole batch the step leaves {times} times as much, too"
    return Indication(False, because)


def comes_with_ranks(view: View, factor: float) -> bool:
    """True if all gradients have this factor, and the same step is right on one rank."""
    held = common_factor(view)
    if held is None or not _equal(held, factor):
        return False
    alone = view.factor_on_one_rank()
    return alone is not None and _equal(alone, 1.0)


def _equal(factor: float, other: float) -> bool:
    return abs(factor - other) <= EQUAL * max(abs(factor), abs(other))
