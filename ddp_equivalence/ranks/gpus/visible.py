"""Which GPUs CUDA_VISIBLE_DEVICES leaves to a process, by the rules of NVIDIA's CUDA manual."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddp_equivalence.ranks.gpus.gpu import Gpu


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a process with CUDA_VISIBLE_DEVICES=visible may use, in CUDA's order.

    ``visible``: None if the variable is not set. It holds indices, UUIDs or the beginnings of
    UUIDs, of GPUs or of instances of divided GPUs (MIG). As for CUDA, an entry that names no GPU,
    or more than one, ends the list, and a GPU that is named twice empties it. An index is taken as
    NVML's; see ``Gpu.index``. For an instance the divided GPU is returned.
    """
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    names: list[str] = []
    for entry in visible.split(","):
        named = _named(gpus, entry.strip())
        if named is None:
            break
        name, gpu = named
        if name in names:
            return ()
        names.append(name)
        chosen.append(gpu)
    return tuple(chosen)


def plain_uuid(uuid: str) -> str:
    """A GPU's UUID without "GPU-" and in small letters: NVML writes these, and torch does not."""
    return uuid.lower().removeprefix("gpu-")


def _named(gpus: Sequence[Gpu], entry: str) -> tuple[str, Gpu] | None:
    """The UUID, or else the index, of what this entry names, and the GPU that it belongs to."""
    if entry.startswith(("GPU-", "MIG-")):
        found = [
            (uuid, gpu)
            for gpu in gpus
            for uuid in (gpu.uuid or "", *gpu.mig_uuids)
            if uuid.startswith(entry)
        ]
        return found[0] if len(found) == 1 else None
    number = re.match(r"\+?\d+", entry)  # CUDA reads "1st" as 1
    if number is None:
        return None
    index = int(number.group())
    gpu = next((gpu for gpu in gpus if gpu.index == index), None)
    return None if gpu is None else (gpu.uuid or str(index), gpu)
