"""A guard against a pass of nn.DataParallel where it had no devices to be parallel on."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.measurement.work import Evidence


def against_idle_data_parallel(evidence: Mapping[int, Evidence]) -> Unknown | None:
    """Without CUDA devices nn.DataParallel calls the module itself, and is right for nothing."""
    if not any(one.idle_data_parallel for one in evidence.values()):
        return None
    return Unknown(
        UnknownBecause.NOTHING_PARALLEL,
        "the step's nn.DataParallel found no CUDA devices (its device_ids are empty), so it called "
        "the module itself: nothing was parallel, and nothing was shown about nn.DataParallel. "
        'Run it where there are two GPUs, or check its rule with "emulated_data_parallel"',
    )
