"""Warm ranks: sets of ranks that are kept running and used again, and replaced after any failure.

Two cases can use the same set if their RankSetKeys are equal.
"""

from __future__ import annotations

import atexit
import errno
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks.environment import process_group_environment
from ddp_equivalence.ranks.failed_starts import failed_starts
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.gpu_room import gpu_room, lack_of
from ddp_equivalence.ranks.idle_sets import (
    DESCRIPTORS_PER_RANK,
    Environment,
    IdleSets,
    RankSetKey,
)
from ddp_equivalence.ranks.in_process import InProcessRankSet
from ddp_equivalence.ranks.lanes import Lane, cuda_devices
from ddp_equivalence.ranks.one_at_a_time import one_at_a_time
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.server import start_method
from ddp_equivalence.ranks.xdist_locks import Devices, xdist_locks

DESCRIPTORS_TO_START = 16
"""While the ranks of a set start, this many file descriptors are needed in addition."""

NO_MORE_PROCESSES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN)
"""Errors that idle ranks can be the reason for: of file descriptors and of processes."""

WAIT_FOR_OTHER_WORKERS = 30.0
"""Seconds in which ranks try to start on GPUs that other workers of the run have left no room on.
Another worker stops its idle ranks there after the case that it is at."""

PAUSE = 0.5
"""Seconds between two such attempts."""

CUDA_NEEDS_SPAWN = "CUDA in forked subprocess"
"""Part of torch's error on a rank that was forked from a process that has used CUDA."""


class WarmRanks:
    """Lends sets of ranks and keeps them for the next case. ``started``: sets started so far."""

    def __init__(self) -> None:
        self._idle = IdleSets()
        self.started = 0
        self._cuda_needs_spawn = False

    @contextmanager
    def acquire(
        self,
        layout: Layout,
        lane: Lane,
        collective_timeout: float,
        fresh: bool = False,
        in_process: bool = False,
        extra_environment: Environment = (),
    ) -> Iterator[RankSet]:
        """Lend a set of running ranks for the block.

        ``fresh``: start new processes and stop them afterwards. ``in_process``: rank 0 is this
        process. ``extra_environment``: variables for these ranks, in addition to those of this
        process. Raises RankFailed or RanksTimedOut if the ranks do not start, CannotRunHere if the
        run has given up their lane, BadCase if the environment asks for an unknown start method.
        """
        environment = dict(process_group_environment()) | dict(extra_environment)
        key = RankSetKey(
            layout,
            lane,
            collective_timeout,
            tuple(sorted(environment.items())),
            start_method(),
            in_process,
        )
        with one_at_a_time(), self._devices(key) as devices:
            rank_set = None if fresh else self._idle.take(key, devices)
            try:
                if rank_set is None:
                    with failed_starts().noted(lane, layout):
                        self._idle.make_room(key, devices)
                        rank_set = self._start(key, devices)
                yield rank_set
            except BaseException as error:
                # Nobody knows what these ranks are doing now, not even after a KeyboardInterrupt.
                if rank_set is not None:
                    rank_set.broken = True
                    if isinstance(error, RankFailed):
                        error.libraries = tuple(sorted(rank_set.libraries))
                        error.may_pass_now = self._idle.leave_gpus(key, devices, error)
                raise
            finally:
                if rank_set is not None:
                    if fresh or rank_set.broken or must_leave(key, devices):
                        rank_set.stop()
                    else:
                        self._idle.keep(key, devices, rank_set)

    def forget(self) -> None:
        """Forget all ranks in a fork of this process: they belong to its parent."""
        self._idle.forget()

    def stop(self) -> None:
        """Stop all idle ranks."""
        self._idle.stop()

    def idle(self) -> list[RankSet]:
        """The sets that are idle now."""
        return self._idle.sets()

    @contextmanager
    def _devices(self, key: RankSetKey) -> Iterator[Devices]:
        """The GPUs for these ranks; inside the block no other worker of the run gets them."""
        locks = xdist_locks()
        if locks is None:
            yield cuda_devices() if key.lane.device_type == "cuda" else ()
            return
        # Other workers may wait for GPUs on which idle ranks of this one have left no room.
        leave = partial(self._idle.leave_where, locks.is_asked_for)
        with locks.hold(key.layout, key.lane, self._idle.devices_of(key), leave) as devices:
            yield devices

    def _start(self, key: RankSetKey, devices: Devices) -> RankSet:
        """Start a set; try again if something can be done about the reason why it did not start."""
        rank_set_type = InProcessRankSet if key.in_process else RankSet
        until = time.monotonic() + WAIT_FOR_OTHER_WORKERS
        while True:
            on_cuda = key.lane.device_type == "cuda"
            method = "spawn" if on_cuda and self._cuda_needs_spawn else key.method
            rank_set = rank_set_type(
                key.layout, key.lane, key.collective_timeout, key.environment, devices, method
            )
            try:
                _check_descriptors(key.layout.world_size)
                rank_set.start()
            except BaseException as error:
                rank_set.broken = True
                rank_set.stop()
                if self._may_start_now(error, key, devices, method, until):
                    continue
                if not isinstance(error, OSError):
                    raise
                what = f"{key.layout.world_size} ranks could not be started: {error}"
                raise RankFailed(what) from error
            self.started += 1
            return rank_set

    def _may_start_now(
        self,
        error: BaseException,
        key: RankSetKey,
        devices: Devices,
        method: str,
        until: float,
    ) -> bool:
        """Do something that may help after this failure to start; False if there is nothing."""
        if isinstance(error, RankFailed):
            if method != "spawn" and CUDA_NEEDS_SPAWN in str(error):
                self._cuda_needs_spawn = True
                return True
            return self._idle.leave_gpus(key, devices, error) or others_may_leave(
                key, devices, error, until
            )
        no_more = isinstance(error, OSError) and error.errno in NO_MORE_PROCESSES
        return no_more and self._idle.stop_oldest()


def must_leave(key: RankSetKey, devices: Devices) -> bool:
    """True if these ranks must not stay idle, since other workers of the run need their GPUs.

    Where only one process at a time can use a GPU, a rank that stays there keeps all others out.
    """
    locks = xdist_locks()
    return locks is not None and any(
        gpu_room().is_exclusive(gpu) or locks.is_asked_for(gpu) for gpu in key.processes_on(devices)
    )


def others_may_leave(key: RankSetKey, devices: Devices, error: RankFailed, until: float) -> bool:
    """Ask other workers to keep no idle ranks on these GPUs; False if it is too late or no use."""
    locks, gpus = xdist_locks(), key.processes_on(devices)
    if locks is None or not gpus or lack_of(error) is None or time.monotonic() > until:
        return False
    locks.ask_for(gpus)
    time.sleep(PAUSE)
    return True


def _check_descriptors(ranks: int) -> None:
    """Raise OSError unless enough file descriptors are free for this number of ranks.

    Without this check the descriptors could run out while ranks start. That ends the fork server,
    and with it every other rank.
    """
    with ExitStack() as opened:
        for _ in range(ranks * DESCRIPTORS_PER_RANK + DESCRIPTORS_TO_START):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))


@lru_cache(maxsize=1)
def warm_ranks() -> WarmRanks:
    """The warm ranks of this process, which are stopped when it ends."""
    ranks = WarmRanks()
    atexit.register(ranks.stop)
    os.register_at_fork(after_in_child=ranks.forget)
    return ranks
