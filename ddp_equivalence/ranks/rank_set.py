"""A set of ranks: starts the processes, submits work to them, collects results, and stops them."""

from __future__ import annotations

import gc
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any, Protocol

import torch.distributed as dist

from ddp_equivalence.case.layouts import Layout, RankPlace
from ddp_equivalence.ranks import (
    messages,
    pickling,
    process_state,
    process_tree,
    rank_process,
    user_modules,
)
from ddp_equivalence.ranks.backend_names import NCCL_BACKENDS
from ddp_equivalence.ranks.deadlines import Deadline
from ddp_equivalence.ranks.environment import RANK_SET_VARIABLE, process_group_environment
from ddp_equivalence.ranks.failure import RankEnd, RankFailed
from ddp_equivalence.ranks.lanes import Lane, cuda_devices, devices_of_ranks, visible_devices
from ddp_equivalence.ranks.messages import describe_exception, is_describing_exception
from ddp_equivalence.ranks.pickling import pickled_by_value_for_workers
from ddp_equivalence.ranks.process import StartArguments, join_group, rank_environment
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.rank_process import RankProcess
from ddp_equivalence.ranks.server import empty_main_module, start_server

# Listens to all ranks at once until each of them has sent its last message.
#
# Every wait has a deadline, and watches the processes as well as the pipes. A rank that dies or
# hangs therefore becomes part of an error and never makes the run hang.

GRACE = 1.0
"""Seconds that the other ranks get after the first failure, to report what happened to them."""

DESCRIBING = 5.0
"""Seconds that a rank gets on top, if it is seen to describe what it has raised."""

POLL_INTERVAL = 0.25
"""Seconds between two checks of how much output the ranks have written."""


def listen(
    ranks: Mapping[int, RankProcess], last_message: str, deadline: Deadline
) -> Iterator[tuple[int, str, Any]]:
    """Yield (rank, kind, payload) of every message, until each rank has sent ``last_message``.

    Raises RankFailed, or RanksTimedOut at the deadline.
    """
    ends: dict[int, RankEnd] = {}
    waiting = dict(ranks)
    while waiting:
        ready = _wait(waiting, deadline)
        if not ready:
            raise _failure(ends, waiting, deadline.within)
        for number, rank in ready.items():
            message, end = _next_message(rank)
            if message is not None:
                kind, payload = message
                if kind == messages.RAISED:
                    end = rank.end(**payload)
                else:
                    yield number, kind, payload
                    end = rank_process.finished(rank) if kind == last_message else None
            if end is not None:
                ends[number] = end
                del waiting[number]
                if end.failed and deadline.left() > GRACE:
                    grace = f"within {GRACE:g} s of the first failure"
                    deadline = Deadline(time.monotonic() + GRACE, grace)
    if any(end.failed for end in ends.values()):
        raise _failure(ends, waiting, deadline.within)


def _wait(waiting: Mapping[int, RankProcess], deadline: Deadline) -> dict[int, RankProcess]:
    """Wait until ranks have sent a message, ended, or printed too much; {} at the deadline."""
    watched = [rank.connection for rank in waiting.values()]
    watched += [rank.process.sentinel for rank in waiting.values()]
    while (left := deadline.left()) > 0:
        heard_of = wait(watched, min(left, POLL_INTERVAL))
        ready = {
            number: rank
            for number, rank in waiting.items()
            if rank.connection in heard_of
            or rank.process.sentinel in heard_of
            or rank.wrote_too_much()
        }
        if ready:
            return ready
    return {}


def _next_message(rank: RankProcess) -> tuple[tuple[str, Any] | None, RankEnd | None]:
    """(message, None) if the rank has sent a message, (None, end) if it can send no more.

    (None, None) if the rank still works and has sent no new message.
    """
    try:
        if rank.connection.poll():
            return messages.receive(rank.connection), None
        if rank.wrote_too_much():
            return None, rank_process.wrote_too_much(rank)
        if rank.is_alive() or rank.connection.poll():
            return None, None
    except BlockingIOError:  # it hangs in the middle of a message
        return None, rank_process.still_running([rank])[rank.row.rank]
    except (EOFError, OSError):
        pass
    return None, rank_process.died(rank)


def _failure(
    ends: Mapping[int, RankEnd], waiting: Mapping[int, RankProcess], deadline: str
) -> RankFailed:
    """The error, with the end of every rank. Ranks in ``waiting`` are asked where they are."""
    running = rank_process.still_running(waiting.values())
    for number, end in running.items():
        # Such a rank has raised, and needs a moment to read the source lines of its traceback.
        if is_describing_exception(end.detail):
            running[number] = _wait_for_exception(waiting[number]) or end
    return messages.failure({**ends, **running}.values(), deadline)


def _wait_for_exception(rank: RankProcess) -> RankEnd | None:
    """Wait for a rank that is about to report what it has raised."""
    with suppress(OSError):
        rank.connection.poll(DESCRIBING)
    message, end = _next_message(rank)
    if message is not None and message[0] == messages.RAISED:
        end = rank.end(**message[1])
    return end


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
        self.modules_version = user_modules.version()
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
                if payload.changed:
                    self.changed[rank] = payload.changed
                self.not_compared.update(payload.not_compared)
                self.libraries.update(payload.libraries)
                if not payload.can_go_on:
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


# A set of ranks in which rank 0 is the judging process itself, so that a debugger works there.
#
# It serves to debug a step. In every other set each rank is a process of its own, and the judging
# process never joins a process group.

COLLECTIVE_TIMEOUT = 24 * 3600.0
"""Seconds that the other ranks wait in a collective while a user debugs rank 0."""

FAILURE_TIMEOUT = 10.0
"""Seconds in which it is known why rank 0 lost its connection, if another rank failed."""

_destroyed_groups: list[object] = []
"""Groups of stopped rank sets. They are kept, as freeing one can deadlock torch 2.13."""


ABORTS_ONLY_THE_COLLECTIVE = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
"""Unless the user says otherwise, a collective of NCCL that takes too long does not end the judging
process: torch aborts its communicator and no more ("CleanUpOnly" in ProcessGroupNCCL.hpp)."""


class InProcessRankSet(RankSet):
    """Rank 0 works in this process, without a deadline; its exceptions are not wrapped.

    A thread that waits in a collective runs no Python code, so that neither Ctrl-C nor a timeout
    reaches it. It waits at most for ``collective_timeout``.

    The process is a member of the group only while rank 0 works. All other code here, such as the
    user's batch, finds no group, as in every process that judges.
    """

    def __init__(self, layout: Layout, lane: Lane, collective_timeout: float, *more: Any) -> None:
        super().__init__(layout, lane, COLLECTIVE_TIMEOUT, *more)
        self._own_timeout = collective_timeout
        self._rank_0: Rank | None = None
        self._group: object = None
        self._rank_0_environment: dict[bytes, bytes] = {}
        self._work = b""

    def submit(self, work: bytes) -> None:
        """Send the work to the other ranks. Rank 0 begins to work when ``collect`` is called."""
        self._work = work
        super().submit(work)

    def collect(self, deadline: float) -> Iterator[tuple[int, Any]]:
        """Do the work of rank 0, while a thread collects the results of the other ranks.

        After rank 0 has finished, the others get ``deadline`` seconds. Raises RankFailed or
        RanksTimedOut if another rank fails, or has finished and rank 0 still waits for it.
        """
        until = Deadline(math.inf, "while rank 0 worked")
        with ThreadPoolExecutor(1) as thread:
            others = thread.submit(list, self.collect_until(until))
            complete = False
            try:
                yield from ((0, result) for result in self._work_of_rank_0())
                after = Deadline.after(deadline)
                until.within, until.until = after.within, after.until
                yield from others.result()
                complete = True
            except Exception as error:
                failure = self._failure(error, others, until)
                if failure is None:
                    raise
                raise failure from error
            finally:
                if not complete:
                    self._kill_others()

    def _work_of_rank_0(self) -> Iterator[Any]:
        *_, work = pickling.split(self._work)
        outside = process_state.capture()
        process_state.set_environment({**outside.environment, **self._rank_0_environment})
        before = process_state.capture()
        try:
            # The user's modules are those of this process, so there is nothing to edit in them.
            function, argument, _ = pickling.loads(work)
            with self._in_group(), pickled_by_value_for_workers():
                yield from function(self._rank_0, argument)
            changed = process_state.restore(before)
            if changed:
                self.changed[0] = changed
        finally:
            process_state.restore(outside)

    def _failure(
        self, error: Exception, others: Future[list[tuple[int, Any]]], until: Deadline
    ) -> RankFailed | None:
        """The failure of all ranks; None if ``error`` is an exception of rank 0 alone."""
        if isinstance(error, RankFailed) and error.ends:  # rank 0 itself has finished
            return messages.failure([self.rank_end(0, "finished"), *error.ends], until.within)
        described = describe_exception(error)
        if not messages.was_left_waiting(described["what"]):
            return None
        until.within = f"within the {self._own_timeout:g} s that a collective may take"
        until.until = time.monotonic() + FAILURE_TIMEOUT
        ends: Sequence[RankEnd] = getattr(others.exception(), "ends", ())
        ends = ends or [self.rank_end(row.rank, "finished") for row in self._rows_to_start()]
        rank_0 = replace(self.rank_end(0, "exception"), **described | {"waits": True})
        return messages.failure([rank_0, *ends], until.within)

    def _kill_others(self) -> None:
        self.broken = True
        for rank in self._ranks.values():
            rank.kill()

    def stop(self) -> None:
        """Stop the other ranks, and leave the process group."""
        super().stop()
        gc.collect()  # this frees DDP objects that are part of a reference cycle
        if self._group is not None:
            _destroyed_groups.append(self._group)
            if self._is_known():  # else the user's code has ended all groups
                self._leave_group()
        self._rank_0 = self._group = None

    def _leave_group(self) -> None:
        """Leave the group that the other ranks have left by ending.

        On NCCL all ranks of a host have to call ncclCommDestroy, or it hangs; for ncclCommAbort
        those that still run are enough (NVIDIA's documentation of both).
        """
        if dist.group.WORLD is not None:  # a group of the user's own, which stays
            dist.destroy_process_group(self._group)  # type: ignore[arg-type]
            return
        with self._in_group():
            if self.lane.backend in NCCL_BACKENDS:
                dist.distributed_c10d._abort_process_group()  # private: a test fails if it changes
            else:
                dist.destroy_process_group()

    def is_alive(self) -> bool:
        """Also that the user's code has not started or ended a process group here meanwhile."""
        return super().is_alive() and dist.group.WORLD is None and self._is_known()

    def _is_known(self) -> bool:
        """True if torch still has the group. The map is private in torch; without it, it has."""
        known = getattr(dist.distributed_c10d._world, "pg_map", None)
        return known is None or self._group in known

    def _rows_to_start(self) -> Sequence[RankPlace]:
        return self.layout.rows[1:]

    def _join_group(self) -> None:
        before, outside = process_state.capture(), dist.group.WORLD
        try:
            arguments = self._start_arguments(self.layout.rows[0])
            arguments = replace(
                arguments,
                collective_timeout=self._own_timeout,
                environment=(ABORTS_ONLY_THE_COLLECTIVE, *arguments.environment),
            )
            self._rank_0 = join_group(arguments, self._pass_port)
            self._rank_0_environment = rank_environment()
        finally:
            if dist.group.WORLD is not outside:
                self._group = dist.group.WORLD
            process_state.set_world(outside)
            process_state.restore(before)
        super()._join_group()

    @contextmanager
    def _in_group(self) -> Iterator[None]:
        """In the block, the group of the ranks is this process's default group."""
        outside = dist.group.WORLD
        process_state.set_world(self._group)
        try:
            yield
        finally:
            process_state.set_world(outside)

    def _pass_port(self, port: int | None) -> int:
        assert port is not None  # rank 0 has opened the store
        self._send_port(port)
        return port
