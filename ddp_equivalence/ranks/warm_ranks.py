"""Warm ranks: one set per layout, lane and environment, kept over the run, new after trouble."""

from __future__ import annotations

import atexit
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks.environment import group_environment
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.in_process import RanksWithOneHere
from ddp_equivalence.ranks.lanes import Lane, cuda_devices
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.server import start_method
from ddp_equivalence.ranks.xdist_locks import Devices, broker

MAX_IDLE_RANKS = 48
"""Processes kept in waiting; the set that was idle longest goes first."""

DESCRIPTORS = 6
"""Of the judging process for each rank: its connections, output, stacks, sentinel; one to spare."""

STARTING = 16
"""More of them, until all ranks have started."""

ASKS_FOR_SPAWN = "CUDA in forked subprocess"
"""What torch says on a rank whose server has already used CUDA, whatever made it."""

Environment = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Kind:
    """Cases that ask for the same kind of ranks can have the same ranks.

    ``method``: how they are started. ``in_process``: rank 0 is the judging process.
    """

    layout: Layout
    lane: Lane
    collective_timeout: float
    environment: Environment
    method: str
    in_process: bool = False


class WarmRanks:
    """Hands out sets of ranks and keeps them for the next case."""

    def __init__(self) -> None:
        self._idle: dict[tuple[Kind, Devices], RankSet] = {}
        self.started = 0
        self._cuda_asks_for_spawn = False

    @contextmanager
    def acquire(
        self,
        layout: Layout,
        lane: Lane,
        collective_timeout: float,
        fresh: bool = False,
        in_process: bool = False,
        more: Environment = (),
    ) -> Iterator[RankSet]:
        """A started set of ranks; new processes, ended afterwards, if ``fresh``.

        ``in_process``: with rank 0 in this process. ``more``: environment variables that their
        process group begins with, beside the caller's.
        Raises RankFailed or RanksTimedOut if they do not start, BadCase if the environment asks for
        a start method that there is not.
        """
        environment = tuple(sorted((dict(group_environment()) | dict(more)).items()))
        kind = Kind(layout, lane, collective_timeout, environment, start_method(), in_process)
        with self._devices(kind) as devices:
            rank_set = None if fresh else self._idle.pop((kind, devices), None)
            if rank_set is not None and not rank_set.is_alive():  # since its last case ended well
                rank_set.broken = True
                rank_set.stop()
                rank_set = None
            try:
                if rank_set is None:
                    self._make_room(kind)
                    rank_set = self._start(kind, devices)
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
                        self._idle[kind, devices] = rank_set

    def forget(self) -> None:
        """In a fork of the judging process, which must neither use nor end its ranks."""
        self._idle.clear()

    def stop(self) -> None:
        """End all ranks that this process started."""
        while self._idle:
            _, rank_set = self._idle.popitem()
            rank_set.stop()

    @contextmanager
    def _devices(self, kind: Kind) -> Iterator[Devices]:
        """The GPUs for ranks of this kind, shared with the other workers of the run."""
        shared = broker()
        if shared is None:
            yield cuda_devices() if kind.lane.device_type == "cuda" else ()
            return
        prefer = [devices for other, devices in self._idle if other == kind]
        with shared.share(kind.layout, kind.lane, prefer) as devices:
            yield devices

    def _start(self, kind: Kind, devices: Devices) -> RankSet:
        make = RanksWithOneHere if kind.in_process else RankSet
        while True:
            on_cuda = kind.lane.device_type == "cuda"
            method = "spawn" if on_cuda and self._cuda_asks_for_spawn else kind.method
            rank_set = make(
                kind.layout, kind.lane, kind.collective_timeout, kind.environment, devices, method
            )
            try:
                _look_for_room(kind.layout.world_size)
                rank_set.start()
            except BaseException as error:
                rank_set.broken = True
                rank_set.stop()
                forked = method != "spawn"
                if isinstance(error, RankFailed) and forked and ASKS_FOR_SPAWN in str(error):
                    self._cuda_asks_for_spawn = True
                    continue
                if not isinstance(error, OSError):
                    raise
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN) and self._idle:
                    self._idle.pop(next(iter(self._idle))).stop()  # and try again without it
                    continue
                what = f"{kind.layout.world_size} ranks could not be started: {error}"
                raise RankFailed(what) from error
            self.started += 1
            return rank_set

    def _make_room(self, kind: Kind) -> None:
        most = min(MAX_IDLE_RANKS, _room())
        while self._idle and self._count() + kind.layout.world_size > most:
            self._idle.pop(next(iter(self._idle))).stop()  # the one that was idle longest
        for other in [other for other in self._idle if kind.in_process and other[0].in_process]:
            self._idle.pop(other).stop()  # one process is in one world at a time

    def _count(self) -> int:
        return sum(rank_set.layout.world_size for rank_set in self._idle.values())


def _room() -> int:
    """How many ranks this process has descriptors for; half of them are left to others."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_IDLE_RANKS if allowed == resource.RLIM_INFINITY else allowed // 2 // DESCRIPTORS


def _look_for_room(ranks: int) -> None:
    """Raises OSError where the descriptors for so many ranks are not there.

    The fork server, and every rank with it, would not survive that in the middle of a start.
    """
    with ExitStack() as taken:
        for _ in range(ranks * DESCRIPTORS + STARTING):
            taken.callback(os.close, os.open(os.devnull, os.O_RDONLY))


@lru_cache(maxsize=1)
def warm_ranks() -> WarmRanks:
    """The ranks of this process, ended with it."""
    ranks = WarmRanks()
    atexit.register(ranks.stop)
    os.register_at_fork(after_in_child=ranks.forget)
    return ranks
