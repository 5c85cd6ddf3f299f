"""How many processes a run may have on each GPU at once, and about how much memory they hold."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_equivalence.ranks.gpu_room import gpu_room
from ddp_equivalence.ranks.gpus.sharing import BYTES_PER_PROCESS
from ddp_equivalence.ranks.lanes import cuda_devices
from ddp_equivalence.report.wrapping import plural


def process_lines() -> Iterator[str]:
    """A line for the GPUs that share a limit; none without GPUs."""
    room = gpu_room()
    most_on = {device: room.most_on(device) for device in cuda_devices()}
    for most in sorted(set(most_on.values())):
        which = [device for device, limit in most_on.items() if limit == most]
        devices = f"CUDA {plural(len(which), 'device')} {', '.join(which)}"
        where = "each GPU" if len(which) == len(most_on) else devices
        mode = ", as its compute mode demands" if room.is_exclusive(which[0]) else ""
        yield (
            f"Processes: at most {most} at once on {where}{mode}; idle ones end when others need "
            "their place"
        )
    if most_on:
        mebibytes = BYTES_PER_PROCESS // 2**20
        yield (
            f"  An idle process holds about {mebibytes} MiB of its GPU's memory "
            "(an estimate; it was not measured)"
        )
