"""Why a check showed nothing: as a value for other code, and as a sentence for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class UnknownBecause(Enum):
    """Why nothing was shown. The values are written into JSON results."""

    REFERENCE_NOT_FINITE = "reference_not_finite"
    REFERENCE_IS_ZERO = "reference_is_zero"
    CANNOT_REPLAY = "cannot_replay"
    RANK_DID_NOT_REPORT = "rank_did_not_report"
    NO_GRADIENT_LEFT = "no_gradient_left"
    STRATEGY_DID_NOT_RUN = "strategy_did_not_run"
    PLANTED_FAULT_NEVER_FIRED = "planted_fault_never_fired"
    PLANTED_FAULT_CANNOT_SHOW = "planted_fault_cannot_show"
    RANKS_BUILD_OTHER_WEIGHTS = "ranks_build_other_weights"
    RANKS_BUILD_ANOTHER_BATCH = "ranks_build_another_batch"
    REFERENCE_DIVERGES = "reference_diverges"
    NOTHING_TO_COMPARE = "nothing_to_compare"
    IDENTICAL_INPUTS = "identical_inputs"
    ONLY_ROUNDING = "only_rounding"
    LIMIT_ABOVE_SIGNAL = "limit_above_signal"
    NOTHING_PARALLEL = "nothing_parallel"
    AUTOCAST_DIFFERS = "autocast_differs"
    NOTHING_EXCHANGED = "nothing_exchanged"
    COLLECTIVE_NOT_WAITED_FOR = "collective_not_waited_for"
    RANKS_SHARE_A_GPU = "ranks_share_a_gpu"
    RANK_FAILED = "rank_failed"
    RANKS_TIMED_OUT = "ranks_timed_out"
    PROCESS_CHANGED = "process_changed"


@dataclass(frozen=True)
class Unknown:
    """Nothing was shown. ``because``: why, as a value. ``reason``: why, in words."""

    because: UnknownBecause
    reason: str
