"""Keeps what the gradients held after each call that may have changed them."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.measurement.gradient_watch import GradientWatch
from ddp_equivalence.measurement.trace import GradientState, packed, thinned

MOST_OF_A_STATE = 100_000
"""About so many elements are kept of all gradients together after one call."""

FEWEST, MOST = 4, 256
"""So many elements are kept of one gradient."""

MOST_IN_ALL = 2_000_000
"""About so many elements are kept of all states of a rank, which is 16 MB."""


class StateLog:
    """``gradients``: knows the values of the gradients as they were last accepted."""

    def __init__(self, gradients: GradientWatch) -> None:
        self._gradients = gradients
        self._left = MOST_IN_ALL
        self.states: list[GradientState] = []
        self.complete = True
        count = max(1, len(gradients.parameters))
        self.each = max(FEWEST, min(MOST, MOST_OF_A_STATE // count))

    def note(self, call: int, names: Sequence[str]) -> None:
        """Keep what these gradients hold now. ``call``: the number of the call that was made."""
        if self._left <= 0:
            self.complete = False
            return
        values = {}
        for name in names:
            value = self._gradients.known_value(name)
            if value is not None:
                values[name] = b"" if value.numel() == 0 else packed(thinned(value, self.each))
                self._left -= len(values[name]) // 8
        self.states.append(GradientState(call, values))
