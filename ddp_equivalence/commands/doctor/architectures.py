"""Whether a build of torch has kernels for a GPU, by the rules of NVIDIA's compiler manual.

An entry ``sm_XY`` is machine code for compute capability X.Y and later ones of the same X. One that
ends in ``a`` is for X.Y alone, and one that ends in ``f`` for X.Y and later ones, as without it.
``compute_XY`` is code that the driver compiles for any GPU from X.Y on, except with an ``a``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

ENTRY = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


def has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """True if one of the entries fits. True as well where none are known."""
    return not architectures or any(_fits(capability, entry) for entry in architectures)


def _fits(capability: tuple[int, int], entry: str) -> bool:
    match = ENTRY.fullmatch(entry)
    if match is None:
        return True  # a kind of entry that this module does not know speaks against nothing
    kind, major, minor, ending = match.groups()
    code = int(major), int(minor)
    if ending == "a":
        return capability == code
    if kind == "compute" and not ending:
        return capability >= code
    return capability[0] == code[0] and capability >= code
