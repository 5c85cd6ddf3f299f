"""A deadline that may be set while somebody already waits for it."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Deadline:
    """``until``: the deadline by ``time.monotonic()``. ``within``: in words, for errors."""

    until: float
    within: str

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline so many seconds from now."""
        return cls(time.monotonic() + seconds, f"within the {seconds:.3g} s of the deadline")

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.until - time.monotonic()
