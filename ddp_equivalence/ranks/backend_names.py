"""The names of backends and lanes.

This module imports no torch, because pytest reads its command-line options from here.
"""

from __future__ import annotations

NCCL_BACKENDS = ("nccl", "nccl2", "nccl-legacy")
"""The names of NCCL backends in torch.

torch is changing its default from ``nccl`` to ``nccl2``; ``nccl-legacy`` is the old one. A lane
exists for each of them only where the installed torch has that backend.
"""

NCCL_SHARED = "nccl_shared"
"""The lane on which ranks of the backend ``nccl`` share GPUs."""

BACKENDS = ("auto", "gloo", "gloo_cuda", "nccl", NCCL_SHARED, *NCCL_BACKENDS[1:])

LANES = (
    "nccl",
    NCCL_SHARED,
    "gloo_cuda",
    "data_parallel",
    "data_parallel_shared",
    "gloo_fallback",
    "emulated",
    "gloo",
    "nccl2",
    "nccl-legacy",
)
"""The lanes that ``--must-run`` can require."""
