"""Notices the lines that switch the synchronisation of DistributedDataParallel on or off."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch.nn.parallel import DistributedDataParallel


class SynchronisationWatch:
    """Remembers the flag of every wrapper, by a weak reference, so that the step can free it."""

    def __init__(self) -> None:
        self._flags: list[tuple[weakref.ref[DistributedDataParallel], list[bool]]] = []

    def add(self, ddp: DistributedDataParallel) -> None:
        """Watch this wrapper, from how its flag is now. A new wrapper synchronises."""
        self._flags.append((weakref.ref(ddp), [bool(ddp.require_backward_grad_sync)]))

    def changes(self) -> Iterator[bool]:
        """The flags that have changed since the last call, as they are now."""
        for reference, last in self._flags:
            ddp = reference()
            if ddp is not None and bool(ddp.require_backward_grad_sync) != last[0]:
                last[0] = not last[0]
                yield last[0]
