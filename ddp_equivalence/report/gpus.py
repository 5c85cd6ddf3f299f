"""Texts that say on which physical GPUs ranks ran, and in which precision float32 was there."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ddp_equivalence.measurement.cuda_evidence import Tf32
from ddp_equivalence.ranks.physical_gpu import SEVERAL
from ddp_equivalence.report.wrapping import rank_names

SHORT = len("GPU-12345678")
"""So much of a UUID is shown. CUDA_VISIBLE_DEVICES takes it as the name of the GPU, too."""


def gpu_texts(gpus: Mapping[int, str]) -> list[str]:
    """``rank 0 on GPU-12345678`` for every GPU; [] unless every rank has one.

    ``gpus``: rank -> the UUIDs of its GPUs, as in ``Evidence.gpu``.
    """
    if not all(gpus.values()):
        return []
    ranks: dict[str, list[int]] = {}
    for rank, gpu in sorted(gpus.items()):
        ranks.setdefault(" and ".join(one[:SHORT] for one in gpu.split(SEVERAL)), []).append(rank)
    return [f"{rank_names(of_gpu)} on {gpu}" for gpu, of_gpu in ranks.items()]


def tf32_texts(settings: Collection[Tf32 | None]) -> list[str]:
    """One text that says where TF32 was allowed in float32; [] for ranks on the CPU."""
    known = [one for one in settings if one is not None]
    if not known:
        return []
    products = _states({one.products for one in known})
    convolutions = _states({one.convolutions for one in known})
    if products == convolutions:
        return [f"TF32 {products} for products and convolutions of float32"]
    return [f"TF32 {products} for products and {convolutions} for convolutions of float32"]


def _states(allowed: Collection[bool]) -> str:
    if len(allowed) > 1:
        return "on for some ranks and off for others"
    return "on" if True in allowed else "off"
