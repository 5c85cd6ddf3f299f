"""Warm ranks: sets of ranks that are kept running, used again, and replaced after any failure."""

from __future__ import annotations

import atexit
import errno
import os
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ddp_equivalence.case.layouts import Layout, parse
from ddp_equivalence.ranks import Rank, lanes, pickling, user_modules
from ddp_equivalence.ranks.collectives import new_collectives
from ddp_equivalence.ranks.deadlines import one_at_a_time
from ddp_equivalence.ranks.environment import process_group_environment
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.gpu_room import (
    BUSY,
    OUT_OF_MEMORY,
    failed_with,
    gpu_room,
    processes_by_gpu,
)
from ddp_equivalence.ranks.lanes import Lane, cuda_devices, failed_starts, first_device
from ddp_equivalence.ranks.rank_set import InProcessRankSet, RankSet
from ddp_equivalence.ranks.server import start_method

# Two cases can use the same set if their RankSetKeys are equal. Idle sets leave for other ranks of
# the run: where processes or file descriptors are scarce, and where a GPU has no room for more. The
# sets that were idle longest leave first.

DESCRIPTORS_TO_START = 16
"""While the ranks of a set start, this many file descriptors are needed in addition."""

NO_MORE_PROCESSES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN)
"""Errors that idle ranks can be the reason for: of file descriptors and of processes."""

CUDA_NEEDS_SPAWN = "CUDA in forked subprocess"
"""Part of torch's error on a rank that was forked from a process that has used CUDA."""

MAX_IDLE_RANKS = 48
"""At most this many processes are kept idle. The sets that were idle longest are stopped first."""

DESCRIPTORS_PER_RANK = 6
"""File descriptors of the judging process: two pipes, two files, a sentinel, and one to spare."""

_of_the_parent: list[object] = []
"""In a fork: what belongs to the process that forked."""

Environment = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RankSetKey:
    """Cases with equal keys can use the same set of ranks.

    ``method``: how the ranks are started. ``in_process``: rank 0 is the judging process.
    """

    layout: Layout
    lane: Lane
    collective_timeout: float
    environment: Environment
    method: str
    in_process: bool = False

    def processes_on(self, devices: Devices) -> Counter[str]:
        """GPU -> the number of processes that such a set has there, on the GPUs that it was given.

        It is empty on the CPU.
        """
        return processes_by_gpu(self.layout, self.lane, devices)


class WarmRanks:
    """Lends sets of ranks and keeps them for the next case. ``started``: sets started so far."""

    def __init__(self) -> None:
        self._idle: dict[tuple[RankSetKey, Devices], RankSet] = {}
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
            rank_set = None if fresh else self.take(key, devices)
            try:
                if rank_set is None:
                    with failed_starts().noted(lane, layout):
                        self.make_room(key, devices)
                        rank_set = self._start(key, devices)
                yield rank_set
            except BaseException as error:
                # Nobody knows what these ranks are doing now, not even after a KeyboardInterrupt.
                if rank_set is not None:
                    rank_set.broken = True
                    if isinstance(error, RankFailed):
                        error.libraries = tuple(sorted(rank_set.libraries))
                        error.may_pass_now = self.leave_gpus(key, devices, error)
                raise
            finally:
                if rank_set is not None:
                    if fresh or rank_set.broken or must_leave(key, devices):
                        rank_set.stop()
                    else:
                        self.keep(key, devices, rank_set)

    @contextmanager
    def _devices(self, key: RankSetKey) -> Iterator[Devices]:
        """The GPUs for these ranks; inside the block no other worker of the run gets them."""
        locks = xdist_locks()
        if locks is None:
            yield cuda_devices() if key.lane.device_type == "cuda" else ()
            return
        preferred = [devices for idle_key, devices in self._idle if idle_key == key]
        with locks.hold(key.layout, key.lane, preferred) as devices:
            yield devices

    def _start(self, key: RankSetKey, devices: Devices) -> RankSet:
        """Start a set; try again if something can be done about the reason why it did not start."""
        rank_set_type = InProcessRankSet if key.in_process else RankSet
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
                if self._may_start_now(error, key, devices, method):
                    continue
                if not isinstance(error, OSError):
                    raise
                what = f"{key.layout.world_size} ranks could not be started: {error}"
                raise RankFailed(what) from error
            self.started += 1
            return rank_set

    def _may_start_now(
        self, error: BaseException, key: RankSetKey, devices: Devices, method: str
    ) -> bool:
        """Do something that may help after this failure to start; False if there is nothing."""
        if isinstance(error, RankFailed):
            if method != "spawn" and CUDA_NEEDS_SPAWN in str(error):
                self._cuda_needs_spawn = True
                return True
            return self.leave_gpus(key, devices, error)
        no_more = isinstance(error, OSError) and error.errno in NO_MORE_PROCESSES
        return no_more and self.stop_oldest()

    def keep(self, key: RankSetKey, devices: Devices, rank_set: RankSet) -> None:
        """Keep a set that has done its work."""
        self._idle[key, devices] = rank_set

    def take(self, key: RankSetKey, devices: Devices) -> RankSet | None:
        """Take the set out, so that it can work; None if there is none that still can."""
        rank_set = self._idle.pop((key, devices), None)
        if rank_set is None:
            return None
        outdated = rank_set.modules_version != user_modules.version()
        if outdated or not rank_set.is_alive():  # a rank died while it was idle
            rank_set.broken = True
            rank_set.stop()
            return None
        return rank_set

    def idle(self) -> list[RankSet]:
        """The idle sets, first the one that was idle longest."""
        return list(self._idle.values())

    def make_room(self, key: RankSetKey, devices: Devices) -> None:
        """Stop idle sets until there are few enough ranks with those of the new set."""
        most = min(MAX_IDLE_RANKS, _max_ranks()) - key.layout.world_size
        while self._idle and sum(one.layout.world_size for one in self.idle()) > most:
            self.stop_oldest()
        if key.in_process:  # this process can be a rank of only one set at a time
            for idle_key in [idle_key for idle_key in self._idle if idle_key[0].in_process]:
                self._idle.pop(idle_key).stop()
        for gpu, processes in key.processes_on(devices).items():
            most = gpu_room().most_on(gpu)
            while (idle := self._idle_on(gpu)) and sum(idle.values()) + processes > most:
                self._idle.pop(next(iter(idle))).stop()

    def leave_gpus(self, key: RankSetKey, devices: Devices, error: RankFailed) -> bool:
        """Stop the idle sets that share GPUs with ranks for which these had no room.

        False if the ranks failed for another reason, or if there is no such set.
        """
        gpus = key.processes_on(devices)
        if failed_with(error, BUSY):
            gpu_room().exclusive.update(gpus)
        lack = failed_with(error, (*BUSY, *OUT_OF_MEMORY))
        sharing = [idle for idle in self._idle if lack and gpus & idle[0].processes_on(idle[1])]
        for idle in sharing:
            self._idle.pop(idle).stop()
        return bool(sharing)

    def stop_oldest(self) -> bool:
        """Stop the set that was idle longest; False if there is none."""
        if not self._idle:
            return False
        self._idle.pop(next(iter(self._idle))).stop()
        return True

    def stop(self) -> None:
        """Stop all idle sets."""
        while self._idle:
            _, rank_set = self._idle.popitem()
            rank_set.stop()

    def forget(self) -> None:
        """Forget all sets, in a fork of the process that has started them.

        They are not freed: the process group of rank 0 in process would wait for its threads, which
        no fork has.
        """
        _of_the_parent.append(self._idle)
        self._idle = {}

    def _idle_on(self, gpu: str) -> dict[tuple[RankSetKey, Devices], int]:
        """The idle sets on this GPU, with their processes there; first that idle longest."""
        found = {idle_key: idle_key[0].processes_on(idle_key[1])[gpu] for idle_key in self._idle}
        return {idle_key: processes for idle_key, processes in found.items() if processes}


def _max_ranks() -> int:
    """The number of ranks for which half of this process's file descriptors suffice."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_IDLE_RANKS
    return limit // 2 // DESCRIPTORS_PER_RANK


def must_leave(key: RankSetKey, devices: Devices) -> bool:
    """True if these ranks must not stay idle, since other workers of the run need their GPUs.

    Where only one process at a time can use a GPU, a rank that stays there keeps all others out.
    """
    exclusive = gpu_room().exclusive & key.processes_on(devices).keys()
    return bool(exclusive) and xdist_locks() is not None


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


# Shares out CPU cores and GPUs between the workers of one pytest-xdist run.
#
# A worker takes one core or one GPU for each rank. To take one it binds a name in Linux's
# abstract socket namespace. No other process can bind the same name, and the name is free again
# as soon as the worker ends, however it ends. Nothing is sent through the socket, and no file is
# left.
#
# While a worker waits for cores or GPUs, it holds a lock called "turn", and no other worker can
# take any. Otherwise cases with few ranks could make a case with many ranks wait forever.

POLL_INTERVAL = 0.003
"""Seconds between two attempts to take a lock."""

RUN_ID_VARIABLE = "PYTEST_XDIST_TESTRUNUID"
"""pytest-xdist sets this variable in its workers, to the same value for all workers of a run."""

Devices = tuple[str, ...]


class XdistLocks:
    """The locks of one run. ``run_id`` is the same in all processes that share them."""

    def __init__(self, run_id: str, cores: int, devices: Devices) -> None:
        self._run_id = run_id
        self._cores = tuple(f"core {number}" for number in range(cores))
        self._devices = devices

    @contextmanager
    def hold(
        self, layout: Layout, lane: Lane, preferred: Sequence[Devices] = ()
    ) -> Iterator[Devices]:
        """Take one core or GPU per rank, or all if there are fewer, and hold them inside the block.

        Yields the GPUs, as CUDA_VISIBLE_DEVICES names them, or () on the CPU. ``preferred``: the
        GPUs of ranks that are already running, which are taken first if they are free.
        """
        on_gpu = lane.device_type == "cuda"
        names = self._devices if on_gpu else self._cores
        # nn.DataParallel is a single process that drives several GPUs, so it takes all of them.
        takes_all = lane.drives_all_gpus
        wanted = layout.world_size * lane.gpus_per_rank
        wanted = len(names) if takes_all else min(wanted, len(names))
        with ExitStack() as locks:
            with ExitStack() as turn:
                self._take(turn, ["turn"], 1)
                first = [name for devices in preferred for name in devices]
                start = first_device(layout, lane, len(names)) if on_gpu else 0
                ordered = sorted(
                    names,
                    key=lambda name: (name not in first, (names.index(name) - start) % len(names)),
                )
                taken = self._take(locks, ordered, wanted)
            yield tuple(name for name in names if name in taken) if on_gpu else ()

    def _take(self, locks: ExitStack, names: Sequence[str], wanted: int) -> set[str]:
        """Wait until ``wanted`` of these names are locked; ``locks`` releases them on exit."""
        taken: set[str] = set()
        while True:
            for name in names:
                if name not in taken and len(taken) < wanted and self._lock(locks, name):
                    taken.add(name)
            if len(taken) == wanted:
                return taken
            time.sleep(POLL_INTERVAL)

    def _lock(self, locks: ExitStack, name: str) -> bool:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lock.bind(f"\0ddp_equivalence {self._run_id} {name}")
        except OSError:
            lock.close()
            return False
        _held.add(lock)
        locks.callback(_release, lock)
        return True


_held: set[socket.socket] = set()
"""The locks that this process holds."""


def _release(lock: socket.socket) -> None:
    _held.discard(lock)
    lock.close()


def _close_inherited_locks() -> None:
    """Close the locks in a fork, such as a DataLoader's worker, which would otherwise hold them."""
    while _held:
        _held.pop().close()


os.register_at_fork(after_in_child=_close_inherited_locks)


@lru_cache(maxsize=1)
def xdist_locks() -> XdistLocks | None:
    """The locks of this run.

    None outside of pytest-xdist, or where the system has no abstract socket names.
    """
    run_id = os.environ.get(RUN_ID_VARIABLE)
    if run_id is None or sys.platform != "linux":
        return None
    return XdistLocks(run_id, len(os.sched_getaffinity(0)), cuda_devices())


# Calls any function on warm ranks and returns what it returned on each of them.


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def on_ranks(
    layout: str,
    function: Callable[..., Any],
    *arguments: Any,
    backend: str = "gloo",
    deadline: float = 60.0,
    collective_deadline: float = 30.0,
    fresh: bool = False,
) -> tuple[Any, ...]:
    """Call ``function(rank, *arguments)`` on every rank of a layout such as "2x2".

    Returns a tuple with what each rank returned, in the order of ranks. ``deadline``: seconds for
    the whole call. ``collective_deadline``: seconds for one collective; checks with the same value
    use the same warm ranks. ``fresh``: start new ranks for this call. Raises BadCase for an unknown
    layout or backend, RankFailed if a rank raises or dies, RanksTimedOut at the deadline.
    """
    parsed = parse(layout)
    lane = lanes.choose(parsed, backend)
    with warm_ranks().acquire(parsed, lane, collective_deadline, fresh) as rank_set:
        rank_set.submit(pickling.dumps(_call, _Call(function, arguments)))
        by_rank = dict(rank_set.collect(deadline))
    return tuple(by_rank[rank] for rank in sorted(by_rank))


def _call(rank: Rank, call: _Call) -> Iterator[Any]:
    try:
        yield call.function(rank, *call.arguments)
    finally:
        new_collectives()  # read these collectives now, or the next check takes them for its own
