"""What a user can do if a step names a CUDA device that its rank does not have."""

from __future__ import annotations

import re

from ddp_equivalence.ranks.lanes import Lane, missing

NO_CUDA = (
    "No CUDA GPUs are available|Torch not compiled with CUDA enabled|Found no NVIDIA driver"
    "|no CUDA-capable device is detected"
)
NO_SUCH_DEVICE = "invalid device ordinal|invalid device id"


def device_hint(what: str, lane: Lane) -> str:
    """The hint for an exception with this text on a rank of this lane; "" if there is none."""
    if re.search(NO_CUDA, what) and lane.device_type == "cpu":
        return _on_cpu(lane)
    if re.search(NO_SUCH_DEVICE, what, re.IGNORECASE) and lane.device_type == "cuda":
        return _on_cuda(lane)
    return ""


def _on_cpu(lane: Lane) -> str:
    use = "move the model and the data to rank.device"
    if missing("gloo_cuda", 1) is not None:
        return f"torch can use no CUDA device of this machine, so the ranks are on the CPU: {use}."
    why = f"the backend is {lane}"
    if lane.name == "gloo_fallback":
        why = f"NCCL {lane.reason}"
    return (
        f"{why}, so the ranks ran on the CPU, with the GPUs hidden from them. Give this machine's "
        "GPUs to several ranks each with --backend gloo_cuda (in pytest --ddp-backend gloo_cuda, "
        f'in Python check(..., backend="gloo_cuda")), or {use}, which is the CPU here.'
    )


def _on_cuda(lane: Lane) -> str:
    if lane.ranks_share_gpus:
        return (
            "there are fewer GPUs than ranks, so each rank sees a single GPU, which is its cuda:0. "
            "Move the model and the data to rank.device."
        )
    return (
        "each rank sees only the GPUs of its own simulated node, as it would on a real one. "
        "Number them by LOCAL_RANK and not by RANK, or move the model and the data to rank.device."
    )
