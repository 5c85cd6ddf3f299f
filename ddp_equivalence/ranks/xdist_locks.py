"""Shares out CPU cores and GPUs between the workers of one pytest-xdist run, by rank count.

A core or GPU is taken by binding a name in the system's abstract socket namespace: nobody else can
bind it, and it is free again as soon as its holder ends, however that happens. Nothing is sent,
and no file is left. Who waits holds the turn, so that a case with many ranks is not overtaken for
ever by cases with few.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks.lanes import Lane, cuda_devices

PAUSE = 0.003
"""Seconds between two looks whether something has become free."""

RUN = "PYTEST_XDIST_TESTRUNUID"
"""Set by pytest-xdist in its workers, the same for all of one run."""

Devices = tuple[str, ...]


class Broker:
    """``run`` names what shares; ``cores`` and ``devices`` are what there is."""

    def __init__(self, run: str, cores: int, devices: Devices) -> None:
        self._run = run
        self._cores = tuple(f"core {number}" for number in range(cores))
        self._devices = devices

    @contextmanager
    def share(
        self, layout: Layout, lane: Lane, prefer: Sequence[Devices] = ()
    ) -> Iterator[Devices]:
        """Wait for a core or a GPU for each rank, or for all there are; hold them inside.

        Yields the GPUs, as CUDA_VISIBLE_DEVICES names them: one of the ``prefer``red tuples if
        it is free, since warm ranks have it; () on the CPU.
        """
        on_gpu = lane.device_type == "cuda"
        names = self._devices if on_gpu else self._cores
        # nn.DataParallel is one process that drives several GPUs: it gets them all.
        alone = lane.name == "data_parallel"
        wanted = len(names) if alone else min(layout.world_size, len(names))
        with ExitStack() as held:
            with self._turn():
                liked = [name for devices in prefer for name in devices]
                ordered = sorted(names, key=lambda name: (name not in liked, names.index(name)))
                taken = self._take(held, ordered, wanted)
            yield tuple(name for name in names if name in taken) if on_gpu else ()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with ExitStack() as held:
            self._take(held, ["turn"], 1)
            yield

    def _take(self, held: ExitStack, names: Sequence[str], wanted: int) -> set[str]:
        taken: set[str] = set()
        while True:
            for name in names:
                if name not in taken and len(taken) < wanted and self._bound(held, name):
                    taken.add(name)
            if len(taken) == wanted:
                return taken
            time.sleep(PAUSE)

    def _bound(self, held: ExitStack, name: str) -> bool:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0ddp_equivalence {self._run} {name}")
        except OSError:
            claim.close()
            return False
        _claims.add(claim)
        held.callback(_give_up, claim)
        return True


_claims: set[socket.socket] = set()


def _give_up(claim: socket.socket) -> None:
    _claims.discard(claim)
    claim.close()


def _forget_claims() -> None:
    """In a fork of this process, which would hold on to them: workers of a DataLoader."""
    while _claims:
        _claims.pop().close()


os.register_at_fork(after_in_child=_forget_claims)


@lru_cache(maxsize=1)
def broker() -> Broker | None:
    """The broker of this run; None where nobody shares, or the system has no such names."""
    run = os.environ.get(RUN)
    if run is None or sys.platform != "linux":
        return None
    return Broker(run, len(os.sched_getaffinity(0)), cuda_devices())
