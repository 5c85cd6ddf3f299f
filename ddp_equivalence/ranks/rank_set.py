"""A set of ranks: starts the processes, submits work to them, collects results, stops them."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ddp_equivalence.case.layouts import Layout, RankPlace
from ddp_equivalence.ranks import messages, process_tree
from ddp_equivalence.ranks.deadline import Deadline
from ddp_equivalence.ranks.environment import RANK_SET_VARIABLE, process_group_environment
from ddp_equivalence.ranks.failure import RankEnd
from ddp_equivalence.ranks.join_group import StartArguments
from ddp_equivalence.ranks.lanes import Lane, cuda_devices, devices_of_ranks, visible_devices
from ddp_equivalence.ranks.listen import listen
from ddp_equivalence.ranks.rank_process import RankProcess
from ddp_equivalence.ranks.server import empty_main_module, start_server
from ddp_equivalence.ranks.user_modules import carried

START_TIMEOUT = 120.0
"""Seconds that ranks have to join their group. The first ones also wait for torch's import."""

STOP_TIMEOUT = 2.0
"""Seconds that processes have to end after they are told to stop, and again after SIGKILL."""


@dataclass
class Spent:
    """What the ranks of this process have cost by now. ``starts``: how many sets of ranks it has
    started. ``cpu_seconds``: processor time of their work, without their start.
    """

    starts: int = 0
    cpu_seconds: float = 0.0


SPENT = Spent()


class Ranks(Protocol):
    """All that the rest of the package needs from a set of ranks, however they are started."""

    def start(self) -> None: ...

    def submit(self, work: bytes) -> None: ...

    def collect(self, deadline: float) -> Iterator[tuple[int, Any]]: ...

    def stop(self) -> None: ...


class RankSet:
    """The ranks of one layout on one lane, as processes of this host.

    ``environment``: the variables that their process group depends on. ``devices``: the GPUs that
    they may use. ``method``: one of ``ranks.server.START_METHODS``. ``start_timeout``: seconds that
    all ranks have to join their group. ``token``: identifies the set in the environment of its
    ranks. ``modules_version``: the version of the user's modules when the
    set was made. ``broken``: True after any failure; only ``stop()`` may then be called.
    ``not_compared``: the user's modules that the last work imported, and that nobody had compared.
    ``libraries``: those that any work has imported on its ranks.
    ``changed``: rank -> what its last work has changed in its process or left
    running, as phrases.
    """

    def __init__(
        self,
        layout: Layout,
        lane: Lane,
        collective_timeout: float,
        environment: tuple[tuple[str, str], ...] | None = None,
        devices: tuple[str, ...] | None = None,
        method: str = "forkserver",
        start_timeout: float = START_TIMEOUT,
    ) -> None:
        self.layout, self.lane = layout, lane
        self.devices = cuda_devices() if devices is None else devices
        self.broken = False
        self.changed: dict[int, tuple[str, ...]] = {}
        self.not_compared: set[str] = set()
        self.libraries: set[str] = set()
        self.modules_version = carried.version()
        self.token = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._collective_timeout = collective_timeout
        self._method = method
        self._start_timeout = start_timeout
        self._environment = process_group_environment() if environment is None else environment
        self._killed = False
        self._ranks: dict[int, RankProcess] = {}

    def start(self) -> None:
        """Start all processes and let them join one process group.

        Raises RankFailed or RanksTimedOut, or OSError if the system has no room for more processes.
        """
        SPENT.starts += 1
        if self._method == "forkserver":
            start_server()
        with empty_main_module():
            for row in self._rows_to_start():
                rank = self._ranks[row.rank] = RankProcess(row, self._method)
                rank.start(self._start_arguments(row))
        self._join_group()

    @property
    def gpus(self) -> dict[int, str]:
        """The GPU of every rank, as CUDA_VISIBLE_DEVICES names it; empty on the CPU."""
        return devices_of_ranks(self.layout, self.lane, self.devices)

    def process_ids(self) -> list[int]:
        """The process id of each rank that is a process of its own."""
        return [rank.process.pid for rank in self._started()]

    def submit(self, work: bytes) -> None:
        """Send the same work, made by ``pickling.dumps``, to every rank."""
        self.changed = {}
        self.not_compared = set()
        for rank in self._ranks.values():
            if rank.output_file.size():
                rank.output_file.clear()
        for rank in self._ranks.values():
            with suppress(OSError):  # collect() reports a rank that is gone
                messages.send(rank.connection, messages.WORK, work)

    def collect(self, deadline: float) -> Iterator[tuple[int, Any]]:
        """Yield (rank, result) as results arrive, until every rank has finished.

        ``deadline``: seconds from now. Raises RankFailed or RanksTimedOut with the end of every
        rank; the set is then broken, and its processes are gone.
        """
        yield from self.collect_until(Deadline.after(deadline))

    def collect_until(self, deadline: Deadline) -> Iterator[tuple[int, Any]]:
        """The same with a deadline that the caller may still move."""
        issued: dict[int, int] = {}
        for rank, kind, payload in self._listen(messages.FINISHED, deadline):
            results = payload
            if kind == messages.FINISHED:
                results = payload.results
                SPENT.cpu_seconds += payload.cpu_seconds
                if payload.changed or payload.running:
                    self.changed[rank] = payload.changed + payload.running
                self.not_compared.update(payload.not_compared)
                self.libraries.update(payload.libraries)
                same = payload.same_groups and payload.same_modules
                if payload.running or not same:
                    self.broken = True  # this work is complete, but the ranks can do no more
                if payload.issued is not None:
                    issued[rank] = payload.issued
            for result in results:
                yield rank, result
        for rank, count in issued.items():
            if extra := count - min(issued.values()):
                # The rank has not waited for these collectives. In the next work torch would match
                # them with collectives of the other ranks.
                noun = "collective" if extra == 1 else "collectives"
                change = f"{extra} {noun} that other ranks do not call"
                self.changed[rank] = (*self.changed.get(rank, ()), change)
                self.broken = True

    def is_alive(self) -> bool:
        """True if the process of every rank still runs."""
        return all(rank.is_alive() for rank in self._ranks.values())

    def output(self, rank: int) -> str:
        """A rank's output since its last work was submitted, or its last part if it is long."""
        return self._ranks[rank].output() if rank in self._ranks else ""

    def rank_end(self, rank: int, kind: str, what: str = "") -> RankEnd:
        """A RankEnd for one rank, with its output."""
        row = self.layout.rows[rank]
        return RankEnd(rank, row.node, row.local_rank, kind, what, output=self.output(rank))

    def stop(self) -> None:
        """Tell the processes to stop and kill those that do not; a broken set is killed at once."""
        if not self.broken:
            for rank in self._ranks.values():
                with suppress(OSError):
                    messages.send(rank.connection, messages.STOP)
            until = time.monotonic() + STOP_TIMEOUT
            for rank in self._started():
                rank.process.join(max(0.0, until - time.monotonic()))
        self._kill()
        for rank in self._ranks.values():
            rank.close()

    def _rows_to_start(self) -> Sequence[RankPlace]:
        """The ranks that are processes of their own."""
        return self.layout.rows

    def _start_arguments(self, row: RankPlace) -> StartArguments:
        return StartArguments(
            row=row,
            lane=self.lane,
            visible=visible_devices(self.layout, self.lane, self.devices)[row.rank],
            environment=self._environment,
            start_timeout=self._start_timeout,
            collective_timeout=self._collective_timeout,
            token=self.token,
        )

    def _join_group(self) -> None:
        """Wait until all ranks have joined, and pass on the port that rank 0 sends meanwhile."""
        within = f"within the {self._start_timeout:g} s they have to start"
        deadline = Deadline(time.monotonic() + self._start_timeout, within)
        for rank, kind, payload in self._listen(messages.READY, deadline):
            if kind == messages.PORT and rank == 0:
                self._send_port(payload)

    def _send_port(self, port: int) -> None:
        for rank in self._ranks.values():
            messages.send(rank.connection, messages.PORT, port)

    def _listen(self, last_message: str, deadline: Deadline) -> Iterator[tuple[int, str, Any]]:
        """Listen to all ranks; if that does not complete, kill them and mark the set as broken."""
        complete = False
        try:
            yield from listen(self._ranks, last_message, deadline)
            complete = True
        finally:
            if not complete:
                self.broken = True
                self._kill()

    def _started(self) -> list[RankProcess]:
        return [rank for rank in self._ranks.values() if rank.process is not None]

    def _kill(self) -> None:
        """Kill all ranks that are alive, and every process that they have started."""
        alive = [rank for rank in self._started() if rank.is_alive()]
        if self._killed or (not alive and not self.broken):
            return
        self._killed = True
        for rank in self._started():
            if rank not in alive:  # workers that it has forked may wait for it for ever
                process_tree.kill(process_tree.left_in_group(rank.process.pid))
        descendants = [
            process for rank in alive for process in process_tree.descendants(rank.process.pid)
        ]
        for rank in alive:
            rank.kill()
        for rank in self._started():
            rank.process.join(STOP_TIMEOUT)
        process_tree.kill(descendants)
        # A process that has left its rank's tree still has the rank's environment.
        process_tree.kill(process_tree.with_variable(RANK_SET_VARIABLE, self.token))
