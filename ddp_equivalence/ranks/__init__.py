"""Starts rank processes, hands out work to them, says which rank caused a failure, and cleans up.

This package knows nothing of gradients.
"""

from __future__ import annotations

from ddp_equivalence.ranks.rank import Rank

__all__ = ["Rank"]
