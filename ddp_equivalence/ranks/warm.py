"""Warm ranks: one set per layout and lane, kept over the run, replaced after any trouble."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from ddp_equivalence.layouts import Layout
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.rank_set import RankSet

MAX_IDLE_RANKS = 48
"""Processes kept in waiting; the set that was idle longest goes first."""


class WarmRanks:
    """Hands out sets of ranks and keeps them for the next case."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, Lane, float], RankSet] = {}
        self._process = os.getpid()
        self.started = 0

    @contextmanager
    def acquire(
        self, layout: Layout, lane: Lane, collective_timeout: float, fresh: bool = False
    ) -> Iterator[RankSet]:
        """A started set of ranks; new processes, ended afterwards, if ``fresh``."""
        key = layout.name, lane, collective_timeout
        rank_set = None if fresh else self._idle.pop(key, None)
        try:
            if rank_set is None:
                self._make_room(layout.world_size)
                rank_set = RankSet(layout, lane, collective_timeout)
                rank_set.start()
                self.started += 1
            yield rank_set
        except BaseException:
            # Ctrl-C too: what these ranks are doing now nobody knows.
            if rank_set is not None:
                rank_set.broken = True
            raise
        finally:
            if rank_set is not None:
                if fresh or rank_set.broken:
                    rank_set.stop()
                else:
                    self._idle[key] = rank_set

    def stop(self) -> None:
        """End all ranks that this process started."""
        if os.getpid() != self._process:
            return  # a fork of the judging process must not end its ranks
        while self._idle:
            _, rank_set = self._idle.popitem()
            rank_set.stop()

    def _make_room(self, wanted: int) -> None:
        while self._idle and self._count() + wanted > MAX_IDLE_RANKS:
            oldest = next(iter(self._idle))
            self._idle.pop(oldest).stop()

    def _count(self) -> int:
        return sum(rank_set.layout.world_size for rank_set in self._idle.values())


@lru_cache(maxsize=1)
def warm_ranks() -> WarmRanks:
    """The ranks of this process, ended with it."""
    ranks = WarmRanks()
    atexit.register(ranks.stop)
    return ranks
