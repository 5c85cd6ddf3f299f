"""Shares out CPU cores and GPUs between the workers of one pytest-xdist run.

A worker takes one core or one GPU for each rank. To take one it binds a name in Linux's abstract
socket namespace. No other process can bind the same name, and the name is free again as soon as the
worker ends, however it ends. Nothing is sent through the socket, and no file is left.

While a worker waits for cores or GPUs, it holds a lock called "turn", and no other worker can take
any. Otherwise cases with few ranks could make a case with many ranks wait forever.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks.lanes import Lane, cuda_devices, first_device

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
        self._asked_for = ExitStack()
        atexit.register(self._asked_for.close)

    @contextmanager
    def hold(
        self,
        layout: Layout,
        lane: Lane,
        preferred: Sequence[Devices] = (),
        while_waiting: Callable[[], object] = lambda: None,
    ) -> Iterator[Devices]:
        """Take one core or GPU per rank, or all if there are fewer, and hold them inside the block.

        Yields the GPUs, as CUDA_VISIBLE_DEVICES names them, or () on the CPU. ``preferred``: the
        GPUs of ranks that are already running, which are taken first if they are free.
        ``while_waiting`` is called again and again while they are not.
        """
        on_gpu = lane.device_type == "cuda"
        names = self._devices if on_gpu else self._cores
        # nn.DataParallel is a single process that drives several GPUs, so it takes all of them.
        takes_all = lane.drives_all_gpus
        wanted = layout.world_size * lane.gpus_per_rank
        wanted = len(names) if takes_all else min(wanted, len(names))
        with ExitStack() as locks:
            with self._turn(while_waiting):
                first = [name for devices in preferred for name in devices]
                start = first_device(layout, lane, len(names)) if on_gpu else 0
                ordered = sorted(
                    names,
                    key=lambda name: (name not in first, (names.index(name) - start) % len(names)),
                )
                taken = self._take(locks, ordered, wanted, while_waiting)
            yield tuple(name for name in names if name in taken) if on_gpu else ()

    def ask_for(self, devices: Iterable[str]) -> None:
        """Ask all workers to keep no idle ranks on these GPUs from now on.

        A worker that no longer runs asks for nothing.
        """
        for device in devices:
            self._lock(self._asked_for, _asking_for(device))

    def is_asked_for(self, device: str) -> bool:
        """True if a worker, perhaps this one, has asked for this GPU."""
        with ExitStack() as tried:
            return not self._lock(tried, _asking_for(device))

    @contextmanager
    def _turn(self, while_waiting: Callable[[], object]) -> Iterator[None]:
        with ExitStack() as locks:
            self._take(locks, ["turn"], 1, while_waiting)
            yield

    def _take(
        self,
        locks: ExitStack,
        names: Sequence[str],
        wanted: int,
        while_waiting: Callable[[], object],
    ) -> set[str]:
        """Wait until ``wanted`` of these names are locked; ``locks`` releases them on exit."""
        taken: set[str] = set()
        while True:
            for name in names:
                if name not in taken and len(taken) < wanted and self._lock(locks, name):
                    taken.add(name)
            if len(taken) == wanted:
                return taken
            while_waiting()
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


def _asking_for(device: str) -> str:
    return f"no idle ranks on {device}"


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
