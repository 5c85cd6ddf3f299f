"""Start ranks, hand out work, attribute failure, clean up. Knows nothing of gradients."""

from __future__ import annotations

from ddp_equivalence.ranks.rank import Rank

__all__ = ["Rank"]
