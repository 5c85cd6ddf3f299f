"""NCCL refuses two ranks on one GPU, unless they say that they are on different hosts.

Source: ``initTransportsRank`` in init.cc of NCCL, which compares the hash of the host, for which
NCCL_HOSTID can stand, and the PCI bus id. The error is what torch makes of it. NCCL raises it in
the first collective; here it is raised when the group is made, on ranks that have chosen a device.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed import DistBackendError
from torch.distributed import distributed_c10d as c10d

from pretended_gpus import runtime, settings

TEXT = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, invalid usage (run with "
    "NCCL_DEBUG=WARN for details), NCCL version {version}\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\n"
    "Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device {bus:x}"
)


def refuse(group: Any) -> None:
    """Raise what NCCL raises if another rank of the group has the GPU and the host of this one."""
    ranks = c10d.get_process_group_ranks(group)
    if c10d.get_rank() not in ranks:
        return
    own, key = _place(), f"pretended place in {group.group_name} of rank"
    store = c10d._get_default_store()
    store.set(f"{key} {c10d.get_rank()}", own)
    places = [store.get(f"{key} {rank}").decode() for rank in ranks]
    rank = ranks.index(c10d.get_rank())
    for other, place in enumerate(places):
        if own and other != rank and place == own:
            bus = (runtime.gpus()[runtime.current()] + 1) << 12
            version = ".".join(map(str, settings.NCCL))
            raise DistBackendError(TEXT.format(version=version, rank=rank, other=other, bus=bus))


def _place() -> str:
    """The host of this process and its GPU; "" if it has not chosen one yet."""
    if not runtime.has_chosen():
        return ""
    return f"{os.environ.get('NCCL_HOSTID', '')} {runtime.gpus()[runtime.current()]}"
