"""Choose a name in the script for everything that it contains, so that no two are the same."""

from __future__ import annotations

import keyword
from collections.abc import Callable

Key = tuple[str, str]
"""What a name stands for: most often a file and the name there."""


class OutputNames:
    """The names of the script, by what they stand for."""

    def __init__(self) -> None:
        self._chosen: dict[Key, str] = {}
        self._taken: set[str] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._chosen

    def __getitem__(self, key: Key) -> str:
        return self._chosen[key]

    def once(self, key: Key, choose: Callable[[], str]) -> str:
        """The name that was chosen for ``key``; ``choose`` is called the first time only."""
        if key not in self._chosen:
            self._chosen[key] = choose()
        return self._chosen[key]

    def reserve(self, name: str) -> str:
        """Take this name, whether it is free or not."""
        self._taken.add(name)
        return name

    def free(self, *wanted: str) -> str:
        """The first of the wanted names that is free, or the last of them with a number."""
        taken = {*self._taken, *keyword.kwlist}
        numbered = (f"{wanted[-1]}_{number}" for number in range(2, 1000))
        return self.reserve(next(name for name in (*wanted, *numbered) if name not in taken))
