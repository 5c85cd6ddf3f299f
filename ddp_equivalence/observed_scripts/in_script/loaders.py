"""The DataLoaders of a process, which another process of the script has as well."""

from __future__ import annotations

import weakref
from collections.abc import Sized
from typing import Any

from ddp_equivalence.observed_scripts.recorded_step import Epoch


class Loaders:
    """``begun``: those over which the script has iterated, in the order of the first time."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._made: list[weakref.ref[Any]] = []

    def note_made(self, loader: Any) -> None:
        """The script has made this loader."""
        self._made.append(weakref.ref(loader))

    def begins(self, loader: Any) -> int:
        """The script iterates over this loader. Returns its number, which is its place in
        ``begun``.
        """
        if id(loader) not in self._numbers:
            self._numbers[id(loader)] = len(self.begun)
            self.begun.append(loader)
        return self._numbers[id(loader)]

    def number_of(self, loader: Any) -> int | None:
        """The number of a loader, or of the one around which a library has put it; None before its
        first iteration.
        """
        return self._numbers.get(id(_inside_of(loader)))

    def made_as(self, loader: Any) -> int | None:
        """How many loaders the script had made before this one; None if it was not seen."""
        inside = _inside_of(loader)
        places = (place for place, known in enumerate(self._made) if known() is inside)
        return next(places, None)

    def epoch_of(self, loader: Any) -> Epoch:
        """What is known of a loader's epochs."""
        batches, last_rows = _batches_and_last_rows(loader)
        return Epoch(batches, last_rows, self.made_as(loader))


def _inside_of(loader: Any) -> Any:
    """Accelerate hands on the batches of a loader that it keeps under this name."""
    return getattr(loader, "base_dataloader", loader)


def _batches_and_last_rows(loader: Any) -> tuple[int, int]:
    try:
        batches = len(loader)
        size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
        if not size or getattr(loader, "drop_last", True) or not isinstance(sampler, Sized):
            return batches, 0
        return batches, len(sampler) % size
    except Exception:  # such as of a stream, or whatever a sampler of the script's own may raise
        return 0, 0
