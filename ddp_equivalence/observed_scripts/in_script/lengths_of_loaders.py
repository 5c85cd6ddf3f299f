"""How many batches the loaders of a script have, which may be started several times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class LengthsOfLoaders:
    """``path``: of a file by which a later process knows a loader before its first epoch."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
        self._asked: dict[int, int] = {}

    def number_of(self, loader: Any, batches: int) -> int | None:
        """The number that a loader with so many batches had in an earlier process; None if there
        was none.
        """
        self._asked[id(loader)] = batches
        return next(
            (int(number) for number, known in self._known.items() if known == batches), None
        )

    def is_trained_with(self, number: int, loader: Any) -> None:
        """The script begins an epoch of the loader that has this number."""
        batches = self._asked.get(id(loader))
        if batches is not None and str(number) not in self._known:
            self._known[str(number)] = batches
            self._path.write_text(json.dumps(self._known))
