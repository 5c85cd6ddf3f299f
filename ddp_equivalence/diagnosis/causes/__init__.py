"""The explanations that are considered, in the order in which equally good ones are believed."""

from __future__ import annotations

from ddp_equivalence.diagnosis.causes import (
    clipping,
    data,
    factors,
    groups,
    losses,
    model,
    precision,
    sharded,
    unreduced,
    windows,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis

HYPOTHESES: tuple[Hypothesis, ...] = (
    # Weights or examples of the ranks are wrong: the causes below then explain nothing.
    sharded.BUILT_BEFORE,
    *data.CAUSES,
    # The model or the loss makes the difference, not the reduction.
    *model.CAUSES,
    # One factor is wrong, for all parameters.
    factors.MEAN_NOT_SUM,
    groups.MORE_THAN_ONCE,
    factors.SUM_NOT_MEAN,
    losses.GATHER_WITHOUT_GRADIENT,
    windows.NOT_DIVIDED,
    # Ranks or micro-batches are missing in the sum, or have a wrong weight.
    *groups.SEPARATE_GROUPS,
    sharded.SYNC_OFF,
    *unreduced.NO_GRADIENT_REDUCED,
    *losses.UNEQUAL_MEANS,
    windows.LAST_ALONE,
    windows.AFTER_REDUCTION,
    windows.BOUNDARY,
    *groups.LEFT_OUT,
    sharded.CLIPPED_BY_SHARD,
    *clipping.CAUSES,
    precision.OWN_SCALES,
    # Only some parameters are wrong.
    groups.FROZEN,
    sharded.IGNORED,
    *unreduced.SOME_NOT_REDUCED,
    windows.BEFORE_END,
    # On most cases other causes leave the same numbers as these, and are believed first.
    sharded.COUNTED_TWICE,
    factors.AVERAGED_TWICE,
    windows.BY_FULL,
    factors.LOCAL_WORLD_SIZE,
    factors.WRONG_NUMBER,
    losses.ANOTHER_COUNT,
    windows.STALE,
    losses.LOCAL_LOSS_SUMMED,
    precision.NOT_UNSCALED,
    *precision.ROUNDING,
)

CAUSE_OF = {one.name: one for one in HYPOTHESES}
"""Name -> the cause."""
