"""A set of ranks in which rank 0 is the judging process itself, so that a debugger works there.

It serves to debug a step. In every other set each rank is a process of its own, and the judging
process never joins a process group.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from ddp_equivalence.case.layouts import Layout, RankPlace
from ddp_equivalence.ranks import pickling, process_state
from ddp_equivalence.ranks.join_group import join_group, rank_environment
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.worker_pickling import pickled_by_value_for_workers

COLLECTIVE_TIMEOUT = 24 * 3600.0
"""Seconds that the other ranks wait in a collective while a user debugs rank 0."""

_destroyed_groups: list[object] = []
"""Groups of stopped rank sets. They are kept, as freeing one can deadlock torch 2.13."""


class InProcessRankSet(RankSet):
    """Rank 0 works in this process, without a deadline; its exceptions are not wrapped."""

    def __init__(
        self,
        layout: Layout,
        lane: Lane,
        collective_timeout: float,
        environment: tuple[tuple[str, str], ...] | None = None,
        devices: tuple[str, ...] | None = None,
        method: str = "forkserver",
    ) -> None:
        super().__init__(layout, lane, COLLECTIVE_TIMEOUT, environment, devices, method)
        self._rank_0: Rank | None = None
        self._rank_0_environment: dict[bytes, bytes] = {}
        self._work = b""

    def submit(self, work: bytes) -> None:
        """Send the work to the other ranks. Rank 0 begins to work when ``collect`` is called."""
        self._work = work
        super().submit(work)

    def collect(self, deadline: float) -> Iterator[tuple[int, Any]]:
        """Do the work of rank 0, then collect the others' results within ``deadline`` seconds."""
        _, by_value, body = pickling.split(self._work)
        outside = process_state.capture()
        process_state.set_environment({**outside.environment, **self._rank_0_environment})
        before = process_state.capture()
        complete = False
        try:
            function, argument = pickling.loads(by_value, body)
            with pickled_by_value_for_workers():
                for result in function(self._rank_0, argument):
                    yield 0, result
            changed = process_state.restore(before)
            if changed:
                self.changed[0] = changed
            complete = True
        finally:
            process_state.restore(outside)
            if not complete:
                self.broken = True
        yield from super().collect(deadline)

    def stop(self) -> None:
        """Stop the other ranks, and leave the process group."""
        super().stop()
        gc.collect()  # this frees DDP objects that are part of a reference cycle
        if self._rank_0 is not None and dist.is_initialized():
            _destroyed_groups.append(dist.group.WORLD)
            dist.destroy_process_group()
        self._rank_0 = None

    def _rows_to_start(self) -> Sequence[RankPlace]:
        return self.layout.rows[1:]

    def _join_group(self) -> None:
        before = process_state.capture()
        try:
            self._rank_0 = join_group(self._start_arguments(self.layout.rows[0]), self._pass_port)
            self._rank_0_environment = rank_environment()
        finally:
            process_state.restore(before)
        super()._join_group()

    def _pass_port(self, port: int | None) -> int:
        assert port is not None  # rank 0 has opened the store
        self._send_port(port)
        return port
