"""The names of backends and lanes. Imports no torch: pytest reads its options from here."""

from __future__ import annotations

NCCL_BACKENDS = ("nccl", "nccl2", "nccl-legacy")
"""``nccl2`` is the backend that torch is moving its default to, ``nccl-legacy`` the way back; each
only where the installed torch has it."""

BACKENDS = ("auto", "gloo", "gloo_cuda", *NCCL_BACKENDS)

LANES = (
    "nccl",
    "gloo_cuda",
    "data_parallel",
    "gloo_fallback",
    "emulated",
    "gloo",
    "nccl2",
    "nccl-legacy",
)
"""What ``--must-run`` can insist on."""
