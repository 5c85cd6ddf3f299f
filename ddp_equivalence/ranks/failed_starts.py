"""Remembers which ranks on GPUs have never started, so that a run can give them up.

If this torch cannot run on this GPU or with this driver, the ranks of a lane never start, and every
case would find that out again, slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from ddp_equivalence.case import settings
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.lanes import CannotRunHere, Lane


class FailedStarts:
    """The starts of this process: which lanes and layouts have started, and which only failed."""

    def __init__(self) -> None:
        self._started: set[tuple[str, str]] = set()
        self._failed: dict[tuple[str, str], str] = {}

    @contextmanager
    def noted(self, lane: Lane, layout: Layout) -> Iterator[None]:
        """Note whether ranks on GPUs start inside the block.

        Raises CannotRunHere instead of running the block if the run gives up lanes, and these ranks
        have failed to start before and have never started.
        """
        if lane.device_type != "cuda":
            yield
            return
        what = lane.name, layout.name
        reason = self.why_given_up(lane, layout)
        if reason and settings.current().give_up_lanes:
            raise CannotRunHere("backend", lane.name, reason, *what, reason)
        try:
            yield
        except RankFailed as error:
            if what not in self._started:
                self._failed.setdefault(what, str(error).partition("\n")[0])
            raise
        self._started.add(what)
        self._failed.pop(what, None)

    def why_given_up(self, lane: Lane, layout: Layout) -> str:
        """The error with which these ranks failed to start, or "".

        If no ranks of the lane have ever started, it is the first error of any layout.
        """
        if not any(name == lane.name for name, _ in self._started):
            errors = (error for (name, _), error in self._failed.items() if name == lane.name)
            error = next(errors, None)
            return "" if error is None else f"no ranks have ever started on this lane: {error}"
        error = self._failed.get((lane.name, layout.name))
        return "" if error is None else f"ranks on {layout} have failed to start here: {error}"


@lru_cache(maxsize=1)
def failed_starts() -> FailedStarts:
    """The starts of this process."""
    return FailedStarts()
