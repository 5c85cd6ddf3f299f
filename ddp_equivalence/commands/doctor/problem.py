"""A problem of a machine, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """``what`` is wrong, or may surprise; ``advice``: what the owner can do."""

    what: str
    advice: str
