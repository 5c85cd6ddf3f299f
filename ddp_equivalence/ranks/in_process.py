"""Ranks of which rank 0 is the judging process itself: a debugger works in its step.

For looking into a step, never for judging one: the process that judges otherwise joins no group.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ddp_equivalence.case.layouts import Layout, RankPlace
from ddp_equivalence.ranks import pickling, process_state
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.process import join, own_environment
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.rank_set import RankSet

PATIENCE = 24 * 3600.0
"""Seconds that the other ranks wait in a collective while somebody looks around in rank 0."""

_left: list[object] = []
"""Groups of ended sets: freeing one can deadlock a process that lives on (torch 2.13)."""


class RanksWithOneHere(RankSet):
    """Rank 0 works in this process, without a deadline; what it raises is raised as it is."""

    def __init__(
        self,
        layout: Layout,
        lane: Lane,
        collective_timeout: float,
        environment: tuple[tuple[str, str], ...] | None = None,
        devices: tuple[str, ...] | None = None,
        method: str = "forkserver",
    ) -> None:
        super().__init__(layout, lane, PATIENCE, environment, devices, method)
        self._here: Rank | None = None
        self._environment_here: dict[bytes, bytes] = {}
        self._message = b""

    def submit(self, work: bytes) -> None:
        """Hand the work to the other ranks; this one begins in ``collect``."""
        self._message = work
        super().submit(work)

    def collect(self, deadline: float) -> Iterator[tuple[int, Any]]:
        """Work as rank 0, then listen to the others, who get ``deadline`` seconds from then on."""
        _, apart, body = pickling.loads_around(self._message)
        before = process_state.current()
        process_state.set_environment({**before.environment, **self._environment_here})
        in_it = process_state.current()
        complete = False
        try:
            function, argument = pickling.loads(apart, body)
            for result in function(self._here, argument):
                yield 0, result
            changed = process_state.put_back(in_it)
            if changed:
                self.changed[0] = changed
            complete = True
        finally:
            process_state.put_back(before)
            if not complete:
                self.broken = True
        yield from super().collect(deadline)

    def stop(self) -> None:
        """End the other ranks, and leave the group."""
        super().stop()
        gc.collect()  # a DDP object that lingers in a cycle
        if self._here is not None and dist.is_initialized():
            _left.append(dist.group.WORLD)
            dist.destroy_process_group()
        self._here = None

    def _processes_of(self) -> Sequence[RankPlace]:
        return self.layout.rows[1:]

    def _join(self) -> None:
        before = process_state.current()
        try:
            self._here = join(self._birth(self.layout.rows[0]), self._agree)
            self._environment_here = own_environment()
        finally:
            process_state.put_back(before)
        super()._join()

    def _agree(self, port: int | None) -> int:
        assert port is not None  # rank 0 opens the store
        self._tell_port(port)
        return port
