"""The guard against ranks that were meant to have one GPU each, and shared one."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.measurement.work import Evidence
from ddp_equivalence.ranks.backend_names import NCCL_BACKENDS
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.physical_gpu import SEVERAL


def against_shared_gpus(lane: Lane, evidence: Mapping[int, Evidence]) -> Unknown | None:
    """On NCCL no two ranks may have used one GPU, or training on several GPUs was not shown.

    The lane whose ranks share GPUs on purpose says so in its name.
    """
    if lane.backend not in NCCL_BACKENDS or lane.ranks_share_gpus:
        return None
    ranks: dict[str, list[int]] = {}
    for rank, one in sorted(evidence.items()):
        for gpu in filter(None, one.gpu.split(SEVERAL)):
            ranks.setdefault(gpu, []).append(rank)
    for gpu, sharing in ranks.items():
        if len(sharing) > 1:
            return Unknown(
                UnknownBecause.RANKS_SHARE_A_GPU,
                f"ranks {', '.join(map(str, sharing))} have weights or gradients on the same GPU "
                f"({gpu}), so nothing was shown about training on several GPUs: each rank must "
                "compute on the device that it is given (rank.device). Look for "
                "torch.cuda.set_device(0), .cuda() and .to(0) in the step",
            )
    return None
